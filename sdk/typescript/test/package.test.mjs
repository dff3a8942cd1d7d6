// The package as somebody gets it: packed, installed in an empty project, and what is shown there run.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { cpSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { after, before, describe, test } from "node:test";
import { fileURLToPath } from "node:url";
import { COMMAND, House, ROOT, TOKEN } from "./support.mjs";

const HERE = fileURLToPath(new URL("../", import.meta.url));
const EXAMPLES = join(ROOT, "examples", "typescript");
const project = mkdtempSync(join(tmpdir(), "postroom-project-"));

function run(program, words, env = {}) {
  const options = {
    cwd: project,
    env: { ...process.env, POSTROOM_COMMAND: COMMAND, POSTROOM_HOME: join(project, "home"), ...env },
    timeout: 50_000,
  };
  return new Promise((resolve, reject) => {
    execFile(program, words, options, (error, stdout, stderr) => {
      if (error) reject(new Error(`${program} ${words.join(" ")}: ${error.message}\n${stdout}\n${stderr}`));
      else resolve({ stdout, stderr });
    });
  });
}

const script = async (name, env) => (await run(process.execPath, [name], env)).stdout;

before(async () => {
  await run("npm", ["pack", "--ignore-scripts", "--pack-destination", project, HERE]);
  const [packed] = readdirSync(project).filter((name) => name.endsWith(".tgz"));
  writeFileSync(join(project, "package.json"), '{ "type": "module", "private": true }');
  await run("npm", ["install", "--prefer-offline", "--no-audit", "--no-fund", "--no-package-lock", `./${packed}`]);
  cpSync(EXAMPLES, project, { recursive: true });
});

after(() => rmSync(project, { recursive: true, force: true, maxRetries: 3 }));

test("the package holds what it needs and nothing else", () => {
  const installed = join(project, "node_modules", "@postroom", "sdk");
  assert.deepEqual(readdirSync(installed).sort(), ["LICENSE", "README.md", "dist", "package.json"]);
  assert.deepEqual(readdirSync(join(project, "node_modules")).filter((name) => !name.startsWith(".")).sort(), ["@postroom", "ws"]);
});

test("its types are there for a strict program", async () => {
  writeFileSync(
    join(project, "program.ts"),
    `import { connect, foldRun, interval, is, RunTimeout, type Event, type RunResult } from "@postroom/sdk";
     const room = await connect({ model: "scripted:echo", database: "a.db" });
     const session = await room.session("s", { cwd: "/tmp" });
     const result: RunResult = await session.run([{ type: "text", text: "hello" }], { timeout: 1_000, until: "quiescent" });
     const final: string | null = result.finalResponse;
     const seqs: number[] = result.events.map((event: Event) => event.seq);
     for await (const event of session.events(0)) if (is(event, "turn/end")) console.log(event.data.reason.kind satisfies string);
     await session.bind({ onApproval: (request) => request.subject !== "rm" });
     try { foldRun("s", "m", interval(result.events, "m")); } catch (error) { if (error instanceof RunTimeout) error.partial; }
     // @ts-expect-error: there is no such ending
     await session.run("hello", { until: "later" });
     // @ts-expect-error: a token is for a daemon
     await connect({ model: "scripted:echo", token: 1 });
     console.log(final, seqs);`,
  );
  const modules = join(HERE, "node_modules");
  const settings = ["--strict", "--noEmit", "--skipDefaultLibCheck", "--module", "NodeNext", "--target", "ES2022", "--lib", "ES2022", "--types", "node"];
  const roots = ["--typeRoots", join(modules, "@types")];
  await run(process.execPath, [join(modules, "typescript", "bin", "tsc"), ...settings, ...roots, "program.ts"]);
});

test("what the README shows runs as it stands", async () => {
  const readme = readFileSync(join(HERE, "README.md"), "utf8");
  const [, code] = readme.match(/```js\n(.*?)```/s);
  assert.ok(code.trim().split("\n").length <= 10);
  writeFileSync(join(project, "readme.mjs"), code);
  assert.match(await script("readme.mjs"), /^true And now\? completed\n(\d+ completed\n){1,2}$/);
});

const SAYS = {
  "prompt.mjs": /^Hello from Node\ncompleted true\n$/,
  "streaming.mjs": /^turn 1 ended: completed\nTokens are live; events are durable\.\n$/,
  "queue-while-busy.mjs": /turn 1: first\nturn 2: sec\w+\nturn 3: third\n$/,
  "survive-a-restart.mjs": /^turns ended: interrupted, then completed\nAre you still there\?\n$/,
  "approve.mjs": /^allowed: .*looking.*\ndenied: .*rm -r.*\nI looked.*\nok, not_started\n$/,
  "fold-a-log.mjs": /^true completed true\nevents 2 to 11 of 11\n$/,
  "two-programs.mjs": /^the other program was refused.*\nWho owns this\?\nthe watcher saw turn\/start, turn\/end\n$/,
};

test("every example has a test", () => {
  const shown = readdirSync(EXAMPLES).filter((name) => name.endsWith(".mjs"));
  assert.deepEqual(shown.sort(), Object.keys(SAYS).sort());
});

describe("the examples", { concurrency: 3 }, () => {
  for (const [name, says] of Object.entries(SAYS)) shown(name, says);
});

function shown(name, says) {
  test(`the example ${name} runs as it stands`, async (t) => {
    const house = new House(t);
    const env = { PYTHON: join(dirname(COMMAND), "python"), POSTROOM_TOKEN: TOKEN };
    if (name === "two-programs.mjs") {
      await house.daemon(house.script({ text: "Who owns this?", delay_ms: 1_200 }));
      env.POSTROOM_URL = `ws://127.0.0.1:${house.port}`;
    }
    if (name === "survive-a-restart.mjs") env.POSTROOM_PORT = String(await house.freePort());
    assert.match(await script(name, env), says);
  });
}
