/**
 * Cuts a byte stream into lines. A character may be split over chunks: a line is decoded when it is whole.
 */

export class Lines {
  #held: Buffer[] = [];
  #heldBytes = 0;

  /** `limit`: the most bytes that a line may have. */
  constructor(private readonly limit: number) {}

  /**
   * The lines that are complete now, without those that are empty.
   *
   * @throws RangeError a line is longer than the limit.
   */
  feed(chunk: Buffer): string[] {
    const out: string[] = [];
    let start = 0;
    for (let at = chunk.indexOf(10); at !== -1; at = chunk.indexOf(10, start)) {
      this.#hold(chunk.subarray(start, at));
      const line = this.#held.length === 1 ? this.#held[0]! : Buffer.concat(this.#held);
      const text = line.toString("utf8").trimEnd();
      this.#held = [];
      this.#heldBytes = 0;
      if (text !== "") out.push(text);
      start = at + 1;
    }
    if (start < chunk.length) this.#hold(chunk.subarray(start));
    return out;
  }

  #hold(piece: Buffer): void {
    this.#heldBytes += piece.length;
    if (this.#heldBytes > this.limit) throw new RangeError(`a line is longer than ${this.limit} bytes`);
    this.#held.push(piece);
  }
}
