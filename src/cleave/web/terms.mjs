// The volunteer's terms: what must hold while this browser computes. Pure; the page observes and obeys.

/**
 * What the browser says about this device; null where it does not say.
 * `movedBytes` is what this page received and sent since it was opened.
 * @typedef {{isCharging: boolean | null, isVisible: boolean, savesData: boolean | null, movedBytes: number}} Conditions
 * @typedef {{onlyCharging: boolean, saysPlugged: boolean, inBackground: boolean, evenSavingData: boolean,
 *   dataBytes: number}} Terms  `saysPlugged` is the owner's word where the browser cannot tell
 */

/**
 * Why this device must not compute now; null if it may. Unknown means do not compute.
 * @param {Terms} terms
 * @param {Conditions} conditions
 * @returns {string | null}
 */
export function objection(terms, conditions) {
  if (!conditions.isVisible && !terms.inBackground) return "the page is hidden";
  if (terms.onlyCharging) {
    if (conditions.isCharging === false) return "this device runs on its battery";
    if (conditions.isCharging === null && !terms.saysPlugged)
      return "this browser does not say whether the device is plugged in; tick that it is, or untick \"Only while plugged in\"";
  }
  if (conditions.savesData && !terms.evenSavingData) return "this browser is set to save data";
  if (conditions.movedBytes >= terms.dataBytes) return "the data limit is reached; raise it to go on";
  return null;
}

/**
 * What this browser can honor, in words for its owner.
 * @param {{isSecure: boolean, hasBattery: boolean, hasWakeLock: boolean, tellsSaving: boolean}} abilities
 * @returns {{name: string, is: "yes" | "no" | "ask", text: string}[]}
 */
export function abilitiesOf({ isSecure, hasBattery, hasWakeLock, tellsSaving }) {
  const tls = isSecure ? "" : " Some browsers can over TLS.";
  return [
    { name: "Visible", is: "yes", text: "Leaves as soon as the page is hidden, unless you let it keep going." },
    hasBattery
      ? { name: "Charging", is: "yes", text: "Leaves when the device is unplugged, unless you allow the battery." }
      : { name: "Charging", is: "ask", text: `This browser cannot tell, so the page asks you.${tls}` },
    hasWakeLock
      ? { name: "Screen", is: "yes", text: "Stays on while this device computes." }
      : { name: "Screen", is: "no", text: `May switch off, which ends the work; this browser cannot keep it on.${tls}` },
    tellsSaving
      ? { name: "Data saver", is: "yes", text: "Does not join while it is on, unless you allow that." }
      : { name: "Data saver", is: "no", text: "This browser does not say whether it is on; set a data limit above." },
  ];
}
