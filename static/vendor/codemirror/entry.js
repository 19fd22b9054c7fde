// The parts of CodeMirror that the playground uses, as one file. README.md says how it is built.
export { Compartment, EditorState } from "@codemirror/state";
export {
  EditorView,
  drawSelection,
  highlightActiveLine,
  highlightActiveLineGutter,
  highlightSpecialChars,
  keymap,
  lineNumbers,
} from "@codemirror/view";
export { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
export {
  HighlightStyle,
  StreamLanguage,
  bracketMatching,
  indentOnInput,
  indentUnit,
  syntaxHighlighting,
} from "@codemirror/language";
export { python } from "@codemirror/legacy-modes/mode/python";
export { javascript, typescript } from "@codemirror/legacy-modes/mode/javascript";
export { shell } from "@codemirror/legacy-modes/mode/shell";
export { go } from "@codemirror/legacy-modes/mode/go";
export { r } from "@codemirror/legacy-modes/mode/r";
export { java } from "@codemirror/legacy-modes/mode/clike";
export { tags } from "@lezer/highlight";
