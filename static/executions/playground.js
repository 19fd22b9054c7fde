// The playground: an editor in place of the text area, output as it comes, and the request as code.
// Without any of this the form posts what is in the text area.
(() => {
  const form = document.getElementById("play");
  if (!form) {
    return;
  }
  const DRAFT = "playground-draft";
  const IMAGES = ["image/png", "image/jpeg", "image/gif", "image/webp"];
  const area = document.getElementById("play-code");
  const runButton = document.getElementById("play-run");
  const output = document.getElementById("play-output");
  const inSession = form.elements.session !== undefined;

  const { visibleText: visible, shownText, copyText } = globalThis;

  const element = (tag, text, className = "") => {
    const made = document.createElement(tag);
    made.textContent = visible(text);
    made.className = className;
    return made;
  };

  // Text that may be long enough to be scrolled, which takes the keyboard's focus.
  const block = (label, text) => {
    const made = element("pre", text, "record");
    made.tabIndex = 0;
    made.setAttribute("role", "region");
    made.setAttribute("aria-label", label);
    return made;
  };

  // The same for text of any length: its beginning, and a note on what is left out.
  const beginning = (label, text) => {
    const shown = shownText(text);
    const pre = block(label, shown.text);
    return shown.note ? [pre, element("p", shown.note, "record-note")] : [pre];
  };

  // The editor.

  const {
    Compartment, EditorState, EditorView, HighlightStyle, StreamLanguage, tags, ...cm
  } = globalThis.CodeMirror;
  const MODES = {
    python: cm.python, nodejs: cm.javascript, javascript: cm.javascript,
    typescript: cm.typescript, bash: cm.shell, go: cm.go, r: cm.r, java: cm.java,
  };
  const mode = new Compartment();
  const colours = HighlightStyle.define([
    { tag: tags.comment, color: "var(--record-quiet, #57606a)", fontStyle: "italic" },
    { tag: [tags.keyword, tags.operatorKeyword], color: "var(--record-keyword, #a0206b)" },
    { tag: [tags.number, tags.bool, tags.null], color: "var(--record-number, #1f5fa8)" },
    { tag: [tags.string, tags.special(tags.string)], color: "var(--record-string, #2f6f2f)" },
    {
      tag: [tags.definition(tags.variableName), tags.className, tags.standard(tags.variableName)],
      color: "var(--record-name, #6f42c1)",
    },
  ]);
  const look = EditorView.theme({
    "&": { color: "var(--ink)", backgroundColor: "var(--paper)", fontSize: "0.875rem" },
    "&.cm-focused": { outline: "none" },
    ".cm-scroller": {
      fontFamily: "var(--font-family-monospace)", minHeight: inSession ? "8rem" : "20rem",
      maxHeight: "60vh",
      overflow: "auto",
    },
    ".cm-content": { caretColor: "var(--ink)" },
    ".cm-cursor": { borderLeftColor: "var(--ink)" },
    ".cm-gutters": {
      color: "var(--soft)", backgroundColor: "var(--darkened-bg)", borderRight: "1px solid var(--line)",
    },
    ".cm-activeLine": { backgroundColor: "rgb(128 128 128 / 10%)" },
    ".cm-activeLineGutter": { color: "var(--ink)", backgroundColor: "transparent" },
    "&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, .cm-selectionBackground":
      { background: "rgb(37 99 235 / 30%)" },
    ".cm-specialChar": { color: "var(--bad)" },
  });

  const language = () =>
    inSession
      ? form.elements.context.selectedOptions[0]?.dataset.language ?? ""
      : form.elements.language.value.trim();
  const modeNow = () => (MODES[language()] ? StreamLanguage.define(MODES[language()]) : []);

  const run = () => {
    if (!runButton.disabled) {
      form.requestSubmit(runButton);
    }
    return true;
  };
  const host = element("div", "", "play-editor");
  // Its styles are allowed in a shadow root: there they are no `<style>`.
  const root = host.attachShadow({ mode: "open" });
  const editor = new EditorView({
    root,
    parent: root,
    state: EditorState.create({
      doc: area.value,
      extensions: [
        cm.keymap.of([{ key: "Mod-Enter", run }]),
        cm.lineNumbers(),
        cm.highlightSpecialChars(),
        cm.history(),
        cm.drawSelection(),
        cm.bracketMatching(),
        cm.indentOnInput(),
        cm.indentUnit.of("    "),
        cm.highlightActiveLine(),
        cm.highlightActiveLineGutter(),
        cm.syntaxHighlighting(colours),
        cm.keymap.of([...cm.defaultKeymap, ...cm.historyKeymap, cm.indentWithTab]),
        mode.of(modeNow()),
        look,
        EditorView.lineWrapping,
        EditorView.contentAttributes.of({ "aria-label": "Code" }),
        EditorView.updateListener.of((update) => {
          if (update.docChanged) {
            area.value = update.state.doc.toString();
          }
        }),
      ],
    }),
  });
  area.hidden = true;
  area.insertAdjacentElement("afterend", host);
  document.getElementById("play-keys").hidden = false;
  document.getElementById("play-code-label").addEventListener("click", () => editor.focus());
  const setCode = (text) =>
    editor.dispatch({ changes: { from: 0, to: editor.state.doc.length, insert: text } });
  (inSession ? form.elements.context : form.elements.language).addEventListener("change", () =>
    editor.dispatch({ effects: mode.reconfigure(modeNow()) }),
  );

  // What was typed when a session was opened is what its first cell begins with.
  const draft = sessionStorage.getItem(DRAFT);
  sessionStorage.removeItem(DRAFT);
  if (inSession && draft && !area.value) {
    setCode(draft);
  }

  // Errors stand beside what they are about.

  const showError = (field = "form", text = "") => {
    for (const shown of document.querySelectorAll(".live-error, #error-form")) {
      shown.textContent = "";
    }
    for (const control of form.elements) {
      control.removeAttribute("aria-invalid");
    }
    if (text) {
      const place = document.getElementById(`error-${field}`);
      (place ?? document.getElementById("error-form")).textContent = text;
      form.elements[field]?.setAttribute?.("aria-invalid", "true");
    }
  };

  const send = async (url) => {
    showError();
    const response = await fetch(url, {
      method: "POST",
      body: new FormData(form),
      headers: { Accept: "application/json" },
      credentials: "same-origin",
    });
    const type = response.headers.get("Content-Type") ?? "";
    if (response.redirected || !type.startsWith("application/json")) {
      throw new Error(
        response.redirected
          ? "You are not signed in any more."
          : `The server answered ${response.status}.`,
      );
    }
    const said = await response.json();
    if (said.error) {
      const { field, code, message } = said.error;
      showError(field, field === "form" ? `${code}: ${message}` : message);
      return null;
    }
    return said;
  };

  // One run, and what is told of it.

  const GOOD = ["succeeded"];
  const OPEN = ["queued", "running"];

  // A run that nobody has begun after so long may not be begun today.
  const PATIENCE_SECONDS = 10;
  // Each takes one of the few connections that a browser has to one server.
  const MOST_FOLLOWED = inSession ? 3 : 1;
  let followed = [];
  // The run that the button waits for.
  let awaited = null;

  const free = (parts) => {
    if (awaited === parts) {
      runButton.disabled = false;
    }
  };

  const PARTS = ["status", "time", "page", "cancel", "code", "error", "text", "note", "more"];

  const show = (begun, code) => {
    const made = document.getElementById("play-template").content.cloneNode(true);
    const parts = Object.fromEntries(
      PARTS.map((name) => [name, made.querySelector(`[data-part=${name}]`)]),
    );
    parts.whole = made.querySelector("article");
    parts.page.href = begun.page;
    parts.page.textContent = `Execution ${begun.id}`;
    parts.text.setAttribute("aria-label", `Output of ${begun.id}`);
    if (inSession) {
      const shown = shownText(code);
      parts.code.textContent = shown.text;
      parts.code.after(...(shown.note ? [element("p", shown.note, "record-note")] : []));
      parts.code.hidden = false;
      parts.code.setAttribute("aria-label", `Code of ${begun.id}`);
    } else {
      output.replaceChildren();
    }
    output.append(made);
    parts.whole.scrollIntoView({ block: "nearest" });
    return parts;
  };

  const status = (parts, value) => {
    const kind = GOOD.includes(value) ? "good" : OPEN.includes(value) ? "warn" : "bad";
    parts.status.textContent = value.replaceAll("_", " ");
    parts.status.className = `badge badge-${kind}`;
  };

  const say = (place, text) => {
    place.textContent = visible(text);
    place.hidden = !text;
  };

  const follow = (begun, code) => {
    const parts = show(begun, code);
    awaited = parts;
    status(parts, "queued");
    say(parts.error, begun.waits_for_approval ? "It waits until somebody approves it." : "");
    if (begun.waits_for_approval) {
      free(parts);
    }
    const since = performance.now();
    let isBegun = false;
    const clock = setInterval(() => {
      const seconds = (performance.now() - since) / 1000;
      parts.time.textContent = `${seconds.toFixed(0)} s`;
      if (!isBegun && seconds > PATIENCE_SECONDS) {
        free(parts);
      }
    }, 1000);
    const end = () => {
      clearInterval(clock);
      free(parts);
    };
    if (begun.cancel) {
      parts.cancel.hidden = false;
      parts.cancel.addEventListener("click", () => cancel(parts, begun));
    }
    parts.whole.addEventListener("run:started", () => {
      isBegun = true;
      status(parts, "running");
      say(parts.error, "");
    });
    parts.whole.addEventListener("run:done", (event) => {
      end();
      parts.cancel.hidden = true;
      tell(parts, begun, event.detail);
    });
    parts.whole.addEventListener("run:lost", end);
    followed = followed.filter((each) => !each.hasEnded);
    followed.push(globalThis.followRun(parts.text, begun.events));
    if (followed.length > MOST_FOLLOWED) {
      followed.shift().end();
    }
  };

  const cancel = async (parts, begun) => {
    parts.cancel.disabled = true;
    const body = new FormData();
    body.append("csrfmiddlewaretoken", form.elements.csrfmiddlewaretoken.value);
    try {
      // What comes of it is told as an event.
      await fetch(begun.cancel, { method: "POST", body, redirect: "manual" });
    } catch {
      parts.cancel.disabled = false;
    }
  };

  const tell = (parts, begun, execution) => {
    status(parts, execution.status);
    const total = execution.timings.total_ms;
    const took = total === null ? "" : `${(total / 1000).toFixed(2)} s`;
    const code = execution.exit_code ? `exit code ${execution.exit_code}` : "";
    parts.time.textContent = [took, code].filter(Boolean).join(", ");
    const error = execution.error;
    say(parts.error, error ? [error.code, error.message].filter(Boolean).join(": ") : "");
    const more = (heading, ...shown) =>
      parts.more.append(element("p", heading, "record-note"), ...shown);
    if (execution.has_result) {
      more("Result", ...beginning("Result", JSON.stringify(execution.result, null, 2)));
    }
    execution.outputs.forEach((bundle, number) => {
      if (IMAGES.some((type) => type in bundle)) {
        const image = element("img", "", "artifact-image");
        image.alt = `Output ${number + 1}`;
        // Drawn only where its bytes are an image, which the server looks at.
        image.src = begun.page.replace(/change\/$/, `outputs/${number}/image`);
        parts.more.append(image);
      } else if (typeof bundle["text/plain"] === "string") {
        parts.more.append(...beginning(`Output ${number + 1}`, bundle["text/plain"]));
      }
    });
    if (execution.artifacts.length) {
      more(`Files: ${execution.artifacts.map((each) => each.name).join(", ")}`);
    }
    if (!execution.stdout && !execution.stderr && !parts.more.childElementCount && !error) {
      more("It printed nothing.");
    }
  };

  // The request as code.

  const showSnippets = (snippets) => {
    const list = document.getElementById("play-snippet-list");
    list.replaceChildren();
    for (const [name, text] of Object.entries(snippets)) {
      const heading = element("h3", name);
      const pre = block(name, text);
      const copy = element("button", "Copy", "button button-quiet");
      copy.type = "button";
      copy.setAttribute("aria-label", `Copy ${name}`);
      copy.addEventListener("click", () => copyText(copy, text));
      heading.append(copy);
      list.append(heading, pre);
    }
    const shown = document.getElementById("play-shown");
    shown.hidden = false;
    shown.scrollIntoView({ block: "nearest" });
  };

  form.addEventListener("submit", async (event) => {
    const pressed = event.submitter ?? runButton;
    if (pressed.id === "play-open") {
      sessionStorage.setItem(DRAFT, area.value);
      return;
    }
    event.preventDefault();
    const isRun = pressed === runButton;
    const code = area.value;
    if (isRun) {
      runButton.disabled = true;
      awaited = null;
    }
    try {
      const said = await send(isRun ? form.action : pressed.formAction);
      if (!said) {
        runButton.disabled = runButton.disabled && !isRun;
      } else if (isRun) {
        follow(said, code);
        // Unless the next cell was begun meanwhile.
        if (inSession && area.value === code) {
          setCode("");
        }
      } else {
        showSnippets(said.snippets);
      }
    } catch (problem) {
      runButton.disabled = runButton.disabled && !isRun;
      showError("form", problem.message);
    }
  });
})();
