// The token in a page's address. What follows # never travels.

/**
 * Read the token after #; people may also paste what native devices get, which ends with a certificate's fingerprint.
 * @param {string} hash
 */
export function tokenOf(hash) {
  const text = decoded(hash.slice(1));
  return /^([A-Za-z0-9_-]+)\.[A-Za-z0-9_-]{22}$/.exec(text)?.[1] ?? text;
}

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a % that begins nothing
  }
}
