// Writes src/protocol.ts from protocol/schema.json. With --check it writes nothing and fails if stale.
// It knows the few forms that the schema uses, and fails at any other.

import { readFileSync, writeFileSync } from "node:fs";

const root = new URL("../", import.meta.url);
const target = new URL("src/protocol.ts", root);

function loadSchema() {
  return JSON.parse(readFileSync(new URL("../../protocol/schema.json", root), "utf8"));
}

/** The TypeScript source for a schema document, as text. */
export function generate(schema) {
  const out = [
    "// Generated from protocol/schema.json by scripts/generate.mjs. Do not edit: `npm run generate`.",
    "",
    `export const PROTOCOL_VERSION = ${schema.version};`,
    "",
    "/** The largest frame either side takes, in bytes of UTF-8. */",
    `export const FRAME_BYTES_MAX = ${schema.frameBytesMax};`,
    "",
    "/** The number of each error, by its stable name. */",
    "export const ERROR_NUMBERS = {",
    ...Object.entries(schema.errors).map(([name, number]) => `  ${name}: ${number},`),
    "} as const;",
    "",
  ];
  for (const definition of Object.values(schema.$defs)) {
    for (const key of Object.keys(definition.properties ?? {})) names.add(key);
  }
  for (const [name, definition] of Object.entries(schema.$defs)) {
    out.push(...comment(definition.description), ...declaration(name, definition), "");
  }
  out.push("/** The methods of the runtime. */", ...methods("Methods", schema.methods), "");
  out.push("/** The methods of the client. */", ...methods("ClientMethods", schema.clientMethods), "");
  out.push("/** What the runtime says by itself. */", ...table("Notifications", schema.notifications), "");
  out.push("/** The data of each event type. */", ...table("EventTypes", schema.events), "");
  return out.join("\n");
}

const names = new Set();

function comment(description) {
  if (!description) return [];
  const said = description.replace(/``(.+?)``/g, (_, word) => {
    const camel = word.replace(/_([a-z])/g, (_, letter) => letter.toUpperCase());
    return `\`${names.has(camel) ? camel : word}\``;
  });
  const lines = said.replaceAll("None", "null").split("\n");
  if (lines.length === 1) return [`/** ${lines[0]} */`];
  return ["/**", ...lines.map((line) => ` * ${line}`.trimEnd()), " */"];
}

function declaration(name, definition) {
  const properties = Object.entries(definition.properties ?? {});
  if (properties.length === 0) return [`export type ${name} = Record<string, never>;`];
  const required = new Set(definition.required);
  return [
    `export interface ${name} {`,
    ...properties.map(([key, s]) => `  ${key}${required.has(key) ? "" : "?"}: ${type(s, name + "." + key)};`),
    "}",
  ];
}

function methods(name, entries) {
  return [
    `export interface ${name} {`,
    ...Object.entries(entries).map(
      ([method, { params, result }]) =>
        `  ${JSON.stringify(method)}: { params: ${type(params, method)}; result: ${type(result, method)} };`,
    ),
    "}",
  ];
}

function table(name, entries) {
  return [
    `export interface ${name} {`,
    ...Object.entries(entries).map(([key, schema]) => `  ${JSON.stringify(key)}: ${type(schema, key)};`),
    "}",
  ];
}

// What limits a value, but not its type.
const LIMITS = new Set([
  ...["default", "title", "description", "discriminator"],
  ...["pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"],
]);

function type(schema, at) {
  const keys = Object.keys(schema).filter((key) => !LIMITS.has(key));
  const form = keys.sort().join(" ");
  if (form === "") return "unknown";
  if (form === "$ref") return schema.$ref.replace("#/$defs/", "");
  if (form === "enum") return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (form === "anyOf") return [...new Set(schema.anyOf.map((one) => type(one, at)))].join(" | ");
  if (form === "type" || form === "additionalProperties type" || form === "items type") {
    switch (schema.type) {
      case "string":
      case "boolean":
      case "null":
        return schema.type;
      case "integer":
      case "number":
        return "number";
      case "array": {
        const item = schema.items ? type(schema.items, at) : "unknown";
        return item.includes(" ") ? `(${item})[]` : `${item}[]`;
      }
      case "object": {
        const value = schema.additionalProperties;
        return `Record<string, ${value && value !== true ? type(value, at) : "unknown"}>`;
      }
    }
  }
  throw new Error(`${at}: the generator does not know ${JSON.stringify(schema)}`);
}

if (process.argv[1] && import.meta.url === new URL(`file://${process.argv[1]}`).href) {
  const source = generate(loadSchema());
  if (!process.argv.includes("--check")) {
    writeFileSync(target, source);
  } else if (readFileSync(target, "utf8") !== source) {
    console.error("src/protocol.ts is stale: npm run generate");
    process.exitCode = 1;
  }
}
