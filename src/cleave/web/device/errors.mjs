// The one error of the protocol: the server said something that a device must not act upon. The connection ends.

export class ProtocolError extends Error {
  name = "ProtocolError";
}

/**
 * @param {unknown} holds
 * @param {string} message
 * @returns {asserts holds}
 */
export function require(holds, message) {
  if (!holds) throw new ProtocolError(message);
}
