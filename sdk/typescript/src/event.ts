/** Events of a session's log, by type. */

import type { Event, EventTypes } from "./protocol.js";

export type { Event };

/** An event of one known type. */
export type EventOf<T extends keyof EventTypes> = Omit<Event, "type" | "data"> & { type: T; data: EventTypes[T] };

/** Whether an event is of this type; then its data is typed. */
export function is<T extends keyof EventTypes>(event: Event, type: T): event is Event & EventOf<T> {
  return event.type === type;
}
