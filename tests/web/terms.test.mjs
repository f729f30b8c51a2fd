// The terms of whoever lends a browser, and the token of a link.

import assert from "node:assert/strict";
import { test } from "node:test";

import { abilitiesOf, objection } from "../../src/cleave/web/terms.mjs";
import { tokenOf } from "../../src/cleave/web/token.mjs";

const TERMS = { onlyCharging: true, saysPlugged: false, inBackground: false, evenSavingData: false, dataBytes: 1000 };
const FINE = { isCharging: true, isVisible: true, savesData: false, movedBytes: 999 };

test("what the terms allow meets no objection", () => {
  assert.equal(objection(TERMS, FINE), null);
  assert.equal(objection(TERMS, { ...FINE, savesData: null }), null);
});

for (const [name, now, allowed, words] of /** @type {[string, object, object, RegExp][]} */ ([
  ["a hidden page", { isVisible: false }, { inBackground: true }, /hidden/],
  ["a device on its battery", { isCharging: false }, { onlyCharging: false }, /battery/],
  ["a device that may be on its battery", { isCharging: null }, { saysPlugged: true }, /plugged in/],
  ["a browser that saves data", { savesData: true }, { evenSavingData: true }, /save data/],
  ["a page that moved as much as it may", { movedBytes: 1000 }, { dataBytes: 2000 }, /data limit/],
]))
  test(`${name} must not compute unless its owner allows it`, () => {
    assert.match(String(objection(TERMS, { ...FINE, ...now })), words);
    assert.equal(objection({ ...TERMS, ...allowed }, { ...FINE, ...now }), null);
  });

test("the owner's word does not count where the browser knows better", () => {
  assert.match(String(objection({ ...TERMS, saysPlugged: true }, { ...FINE, isCharging: false })), /battery/);
});

test("what a browser cannot honor is said, and what encryption would change", () => {
  const [all, none] = [true, false].map((is) => abilitiesOf({ isSecure: is, hasBattery: is, hasWakeLock: is, tellsSaving: is }));
  assert.deepEqual(all.map(({ is }) => is), ["yes", "yes", "yes", "yes"]);
  assert.deepEqual(none.map(({ is }) => is), ["yes", "ask", "no", "no"]);
  assert.deepEqual(none.map(({ text }) => text.includes("TLS")), [false, true, true, false]);
});

test("a link's token is found with and without a fingerprint, and whatever it contains", () => {
  const pin = "Abcdefghijklmnopqrst_-";
  for (const [hash, token] of [
    ["", ""], ["#", ""], ["#abc", "abc"], [`#abc.${pin}`, "abc"], ["#my.own.token", "my.own.token"],
    ["#with%20%23", "with #"], ["#100%", "100%"],
  ])
    assert.equal(tokenOf(hash), token);
});
