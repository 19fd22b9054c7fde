// What an execution puts out while it runs, in an element with the address of its events in
// `data-follow`. Whoever has made such an element later gives it to `followRun`. On the way the
// element dispatches `run:started` and, with the record in `detail`, `run:done`, or `run:lost` where
// it cannot be followed to its end; all bubble. `end` of what `followRun` returns gives it up.
// `visibleText` and `shownText` make other text of somebody hostile fit to be looked at.
(() => {
  "use strict";

  // As providers/hidden_characters.py has them: characters that act, hide or move others.
  const HIDDEN = new RegExp(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f" +
      "\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff0-\\ufffb" +
      "\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e0fff}]",
    "gu",
  );
  const MOST_CHARACTERS = 100_000;
  const MOST_OF_LINE = 2_000;
  // Of two streams that take turns with every character.
  const MOST_PIECES = 2_000;
  const NEAR_END = 24;
  const OPEN = ["queued", "running"];
  const AGAIN_SECONDS = 3;

  const visible = (text) =>
    text
      .replaceAll("\r\n", "\n")
      .replace(
        HIDDEN,
        (found) => `[U+${found.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}]`,
      );

  const shortened = (line) =>
    line.length > MOST_OF_LINE
      ? `${line.slice(0, MOST_OF_LINE)}… [${line.length - MOST_OF_LINE} more characters]`
      : line;

  // As a page may hold it, as `shown` of executions/kernel/presentation.py, and what was left out of it.
  const shown = (text) => {
    const lines = text.slice(0, MOST_CHARACTERS).replaceAll("\r\n", "\n").split("\n");
    const cutLines = lines.filter((line) => line.length > MOST_OF_LINE).length;
    const cut = Math.max(0, text.length - MOST_CHARACTERS);
    const note = [
      cutLines ? `${cutLines === 1 ? "1 long line is" : `${cutLines} long lines are`} shortened.` : "",
      cut ? `${cut === 1 ? "1 more character is" : `${cut.toLocaleString("en")} more characters are`} not shown.` : "",
    ];
    return { text: visible(lines.map(shortened).join("\n")), note: note.filter(Boolean).join(" ") };
  };

  // The output as far as it is shown: its end, in pieces of one stream each.
  class Output {
    constructor(element, note) {
      this.element = element;
      this.note = note;
      this.waiting = [];
      this.size = 0;
      this.column = { stdout: 0, stderr: 0 };
      this.isCut = false;
      this.frame = 0;
    }

    add(stream, text) {
      if (!text) return;
      // What would be dropped again at once is not drawn first.
      if (text.length > MOST_CHARACTERS) {
        this.isCut = true;
        text = text.slice(-MOST_CHARACTERS);
      }
      const last = this.waiting.at(-1);
      if (last?.stream === stream && last.text.length < MOST_CHARACTERS) last.text += text;
      else this.waiting.push({ stream, text });
      this.frame ||= requestAnimationFrame(() => this.draw());
    }

    draw() {
      this.frame = 0;
      const element = this.element;
      const isAtEnd =
        element.scrollHeight - element.scrollTop - element.clientHeight < NEAR_END;
      for (const { stream, text } of this.waiting) this.append(stream, text);
      this.waiting = [];
      const isMuch = () => this.size > MOST_CHARACTERS || element.children.length > MOST_PIECES;
      while (isMuch() && element.children.length > 1) {
        this.size -= element.firstElementChild.lastChild.length;
        element.firstElementChild.remove();
        this.isCut = true;
      }
      const only = element.firstElementChild?.lastChild;
      if (only && this.size > MOST_CHARACTERS) {
        only.deleteData(0, this.size - MOST_CHARACTERS);
        this.size = MOST_CHARACTERS;
        this.isCut = true;
      }
      if (this.isCut && this.note) this.note.textContent = "What came before is not shown now.";
      if (isAtEnd) element.scrollTop = element.scrollHeight;
    }

    append(stream, text) {
      const shown = visible(this.shortened(stream, text));
      const last = this.element.lastElementChild;
      if (last?.classList.contains(`from-${stream}`)) {
        last.lastChild.appendData(shown);
      } else {
        const piece = document.createElement("span");
        piece.className = `from-${stream}`;
        const name = document.createElement("span");
        name.className = "stream-name";
        name.textContent = `${stream}: `;
        piece.append(name, document.createTextNode(shown));
        this.element.append(piece);
      }
      this.size += shown.length;
    }

    // A line that goes on and on would make the browser slow.
    shortened(stream, text) {
      const lines = text.split("\n");
      return lines
        .map((line, number) => {
          const before = number ? 0 : this.column[stream];
          this.column[stream] = before + line.length;
          const room = MOST_OF_LINE - before;
          if (line.length <= room) return line;
          return room > 0 ? `${line.slice(0, room)}…` : "";
        })
        .join("\n");
    }
  }

  // While nobody looks at the page nothing is asked for: it goes on behind the last event.
  class Following {
    constructor(element, url) {
      this.element = element;
      this.url = url;
      const note = element.parentElement?.querySelector("[data-follow-note]");
      this.note = note;
      this.output = new Output(element, note);
      this.after = 0;
      this.hasEnded = false;
      this.onVisibility = () => (document.hidden ? this.pause() : this.begin());
      document.addEventListener("visibilitychange", this.onVisibility);
      if (!document.hidden) this.begin();
    }

    begin() {
      if (this.source || this.hasEnded) return;
      this.source = new EventSource(`${this.url}?after=${this.after}`);
      for (const kind of ["started", "stdout", "stderr", "output", "done", "error"]) {
        this.source.addEventListener(kind, (event) => this.take(kind, event));
      }
    }

    pause() {
      this.source?.close();
      this.source = null;
    }

    take(kind, event) {
      // Without data it is the browser's word on the connection, which it opens again by itself
      // unless the server has refused it.
      if (event.data === undefined) {
        if (this.source?.readyState === EventSource.CLOSED) this.end("lost");
        return;
      }
      const said = JSON.parse(event.data);
      this.after = said.seq;
      if (kind === "stdout" || kind === "stderr") this.output.add(kind, said.text);
      else if (kind === "started") this.tell("run:started", said);
      else if (kind === "error") this.end("lost");
      else if (kind === "done") this.finish(said.execution);
    }

    // A server that stops ends its streams too, and another one goes on.
    finish(execution) {
      this.pause();
      if (OPEN.includes(execution.status)) {
        this.after -= 1;
        setTimeout(() => document.hidden || this.begin(), AGAIN_SECONDS * 1000);
        return;
      }
      this.end("done", execution);
    }

    end(how = "lost", execution = undefined) {
      if (this.hasEnded) return;
      this.pause();
      this.hasEnded = true;
      document.removeEventListener("visibilitychange", this.onVisibility);
      if (how === "lost" && this.note) {
        this.note.textContent = "It cannot be followed any more. Reload the page.";
      }
      this.tell(`run:${how}`, execution);
    }

    tell(name, detail) {
      this.element.dispatchEvent(new CustomEvent(name, { bubbles: true, detail }));
    }
  }

  window.visibleText = visible;
  window.shownText = shown;
  window.followRun = (element, url = element.dataset.follow) => new Following(element, url);
  for (const element of document.querySelectorAll("[data-follow]")) window.followRun(element);
})();
