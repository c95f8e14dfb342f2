// A request as curl and as Python, and a button that copies.

import { hasKey } from "/page/api.js";

export function snippets(path, body) {
  return [block("curl", asCurl(path, body)), block("Python", asPython(path, body))];
}

function asCurl(path, body) {
  const quoted = JSON.stringify(body, shortened, 2).replaceAll("'", "'\\''");
  const key = hasKey() ? ` \\\n  -H "Authorization: Bearer $CALLBOARD_KEY"` : "";
  return `curl ${location.origin}${path} \\\n  -H "Content-Type: application/json"${key} \\\n  -d '${quoted}'`;
}

function asPython(path, body) {
  const key = hasKey() ? 'os.environ["CALLBOARD_KEY"]' : '"unused"';
  const call = path.endsWith("/chat/completions") ? "chat.completions.create" : "completions.create";
  const { continue_final_message: goesOn, ...known } = body;
  const fields = Object.entries(known).map(([name, value]) => `    ${name}=${asLiteral(value)},`);
  if (goesOn) fields.push('    extra_body={"continue_final_message": True},'); // the client has no argument for it
  const lines = [
    ...(hasKey() ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${location.origin}/v1", api_key=${key})`,
    `answer = client.${call}(`,
    ...fields,
    ")",
    `print(answer.choices[0].${path.endsWith("/chat/completions") ? "message.content" : "text"})`,
  ];
  return lines.join("\n");
}

// A picture or video has more letters than there is to read.
function shortened(_, value) {
  return typeof value === "string" && /^data:(image|video)\//.test(value) ? `${value.slice(0, 40)}...` : value;
}

// Of strings, numbers, lists and objects Python and JSON have the same literals.
function asLiteral(value) {
  return JSON.stringify(value, shortened, 1).replaceAll(/\n\s*/g, " ");
}

function block(title, text) {
  const made = Object.assign(document.createElement("figure"), { className: "snippet" });
  const caption = Object.assign(document.createElement("figcaption"), { textContent: title });
  caption.append(copyButton(() => text, title));
  const pre = Object.assign(document.createElement("pre"), { textContent: text, tabIndex: 0 });
  made.append(caption, pre);
  return made;
}

export function copyButton(text, what) {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "copy", textContent: "Copy" });
  button.setAttribute("aria-label", `Copy ${what}`);
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not allowed";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without TLS browsers have no clipboard, only this old command.
    const field = Object.assign(document.createElement("textarea"), { value: text, className: "hidden" });
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}
