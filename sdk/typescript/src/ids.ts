/** Makes ids: a ULID is 26 characters, sortable by time, with 80 random bits. */

import { randomBytes } from "node:crypto";

const CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";

function ulid(): string {
  let value = (BigInt(Date.now()) << 80n) | BigInt(`0x${randomBytes(10).toString("hex")}`);
  let out = "";
  for (let digit = 0; digit < 26; digit++) {
    out = CROCKFORD.charAt(Number(value & 31n)) + out;
    value >>= 5n;
  }
  return out;
}

export const newMessageId = (): string => `msg_${ulid()}`;
export const newSessionId = (): string => `session_${ulid()}`;
