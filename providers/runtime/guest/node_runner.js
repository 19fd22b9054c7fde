'use strict'
// Runs JavaScript for the supervisor: the job comes on descriptor 3, the report goes to 4.
// The shape of frames is described in wire.py.

const fs = require('fs')
const path = require('path')
const Module = require('module')
const util = require('util')
const { pathToFileURL } = require('url')
const acorn = require('internal/deps/acorn/acorn/dist/acorn')

const JOB = 3
const REPORT = 4
const SCRIPT = { ecmaVersion: 'latest', allowHashBang: true }

class ProgramError extends Error {}

function readExactly (size) {
  const buffer = Buffer.alloc(size)
  let filled = 0
  while (filled < size) {
    const count = fs.readSync(JOB, buffer, filled, size - filled, null)
    if (count === 0) process.exit(0)
    filled += count
  }
  return buffer
}

function readFrame () {
  const header = JSON.parse(readExactly(readExactly(4).readUInt32BE(0)).toString())
  const parts = new Map(header.parts.map(([name, size]) => [name, readExactly(size)]))
  return { header, parts }
}

function report (header, parts = []) {
  header.parts = parts.map(([name, content]) => [name, content.length])
  const text = Buffer.from(JSON.stringify(header))
  const size = Buffer.alloc(4)
  size.writeUInt32BE(text.length)
  let frame = Buffer.concat([size, text, ...parts.map(([, content]) => content)])
  while (frame.length > 0) frame = frame.subarray(fs.writeSync(REPORT, frame))
}

// main counts as called by the code itself when it is called, or handed to what will call it,
// outside of every function that is merely defined; a function expression used on the spot is not.
function callsMain (node) {
  if (node === null || typeof node !== 'object') return false
  if (Array.isArray(node)) return node.some(callsMain)
  if (/^(FunctionDeclaration|ClassDeclaration|ClassExpression)$/.test(node.type)) return false
  if (node.type === 'VariableDeclarator' && /Function/.test(node.init?.type)) return false
  if (/^(Call|New)Expression$/.test(node.type)) {
    if ([node.callee, ...node.arguments].some(({ name }) => name === 'main')) return true
  }
  return Object.keys(node).some((key) => callsMain(node[key]))
}

// Statements at the top, also those within blocks: what is within functions and classes is not.
function atTop (nodes) {
  return nodes.flatMap((node) => {
    const own = Object.values(node).flat().filter((each) => typeof each?.type === 'string')
    return /Function|Class/.test(node.type) ? [node] : [node, ...atTop(own)]
  })
}

const named = (node) => node?.name ?? node?.value

function isExports (node) {
  return named(node) === 'exports' ||
    (node.type === 'MemberExpression' && named(node.object) === 'module' && named(node.property) === 'exports')
}

// Whether main has a value at the end: declared, assigned, imported or exported, wherever it stands.
function bindsMain (body) {
  return atTop(body).some((node) => {
    switch (node.type) {
      case 'FunctionDeclaration': case 'ClassDeclaration': return node.id?.name === 'main'
      case 'VariableDeclarator': return JSON.stringify(node.id).includes('"name":"main"')
      case 'ImportSpecifier': case 'ImportDefaultSpecifier': return node.local.name === 'main'
      case 'ExportSpecifier': return named(node.exported) === 'main'
      case 'AssignmentExpression':
        if (named(node.left) === 'main') return true
        if (isExports(node.left)) return /"(name|value)":"main"/.test(JSON.stringify(node.right.properties ?? []))
        return named(node.left.property) === 'main' && isExports(node.left.object)
      default: return false
    }
  })
}

function namesArguments (nodes) {
  return nodes.some((node) => node.type === 'Identifier' && node.name === 'arguments')
}

// Whether the code has a main for its arguments, and does not hand them on itself.
function wantsArguments (body) {
  return bindsMain(body) && !(callsMain(body) && namesArguments(atTop(body)))
}

function checkTaken (code, args) {
  if (args === undefined || Object.keys(args).length === 0 || /\barguments\b/.test(code)) return
  throw new ProgramError('the arguments were not used: the code defines no function main() that could be ' +
    'called with them, and does not use the variable `arguments`')
}

function definesMain (body) {
  return body.some((node) => {
    const declared = /^Export(Named|Default)Declaration$/.test(node.type) ? node.declaration : node
    if (declared?.type === 'FunctionDeclaration') return declared.id?.name === 'main'
    if (declared?.type !== 'VariableDeclaration') return false
    return declared.declarations.some((one) => one.id.name === 'main')
  })
}

function parse (code) {
  try {
    return { isModule: false, body: acorn.parse(code, { ...SCRIPT, allowReturnOutsideFunction: true }).body }
  } catch (scriptError) {
    try {
      return { isModule: true, body: acorn.parse(code, { ...SCRIPT, sourceType: 'module' }).body }
    } catch (moduleError) {
      // Node's own message for the syntax error, with the caller's line, comes from compiling it.
      return { isModule: false, body: [] }
    }
  }
}

// Another name for the program's file where its caller has sent one of that name.
function freeName (name, sent) {
  const { name: stem, ext } = path.parse(name)
  for (let number = 2; sent.some((each) => each === name || each.startsWith(name + '/')); number++) {
    name = `${stem}_${number}${ext}`
  }
  return path.resolve(name)
}

// Has a program that makes the folder of artifacts itself find that it is not there: once, and only
// where there is nothing in it.
function lendArtifacts () {
  const identity = (file) => { const { dev, ino } = fs.lstatSync(file); return `${dev}:${ino}` }
  let lent
  try { lent = identity('artifacts') } catch { return }
  function letGo (file, options) {
    try {
      if (lent === undefined || options?.recursive || identity(file) !== lent) return
      fs.rmdirSync(file)
      lent = undefined
    } catch {}
  }
  for (const [holder, name] of [[fs, 'mkdirSync'], [fs, 'mkdir'], [fs.promises, 'mkdir']]) {
    const make = holder[name]
    holder[name] = function mkdir (file, ...rest) {
      letGo(file, rest[0])
      return Reflect.apply(make, this, [file, ...rest])
    }
  }
  Module.syncBuiltinESMExports()
}

async function load (code, isModule, isMain, isNamed, sent) {
  const file = freeName(isModule ? 'main.mjs' : 'main.js', sent)
  if (isModule) {
    fs.writeFileSync(file, isNamed ? `${code}\nexport { main as __main__ }\n` : code)
    const loaded = await import(pathToFileURL(file))
    return loaded.__main__ ?? loaded.main ?? loaded.default
  }
  fs.writeFileSync(file, code)
  const module = new Module(file, null)
  module.filename = file
  module.paths = [path.resolve('node_modules'), ...Module.globalPaths]
  process.argv[1] = file
  // Where main is called from here, what is behind the guard is not run.
  require.main = process.mainModule = isMain ? new Module('.', null) : module
  if ('arguments' in globalThis) {
    // The function that modules are wrapped in has `arguments` of its own, an arrow function not.
    Module.wrapper[0] = '((exports, require, module, __filename, __dirname) => {'
  }
  const ending = isNamed ? '\n;module.exports.__main__ = typeof main === "function" ? main : undefined;' : ''
  module._compile(code.replace(/^#!.*/, '') + ending, file)
  return module.exports?.__main__ ?? module.exports?.main
}

// What is no finite number becomes null, or is refused where `isStrict`.
function toJson (value, isStrict = true) {
  const refuseNaN = (_, item) => {
    if (typeof item === 'number' && !Number.isFinite(item)) {
      throw new TypeError(`${item} is not JSON`)
    }
    return item
  }
  const text = JSON.stringify(value === undefined ? null : value, isStrict ? refuseNaN : undefined)
  if (text === undefined) throw new TypeError(`a ${typeof value} is not JSON`)
  // JSON.stringify escapes nothing beyond control characters but lone surrogates.
  if (/(^|[^\\])(\\\\)*\\ud[89a-f]/.test(text)) throw new TypeError('a string in it is not valid Unicode')
  return Buffer.from(text)
}

function encode (value, limit) {
  let encoded
  try {
    encoded = toJson(value, false)
  } catch (error) {
    throw new ProgramError(`main() returned a value that is not JSON: ${error.message}`)
  }
  if (encoded.length <= limit) return encoded
  throw new ProgramError(`main() returned ${encoded.length} bytes of JSON, the limit is ${limit}`)
}

async function run ({ header, parts }, sent) {
  const code = parts.get('code').toString()
  const text = parts.get('arguments')?.toString()
  const args = text === undefined ? undefined : JSON.parse(text)
  const { isModule, body } = parse(code)
  const defined = definesMain(body)
  const wanted = header.entrypoint === 'auto'
    ? (args === undefined ? defined && !callsMain(body) : wantsArguments(body))
    : header.entrypoint === 'main'
  if (!wanted && args !== undefined) globalThis.arguments = args
  const isImported = body.some(({ specifiers }) => specifiers?.some(({ local, exported }) => !exported && local.name === 'main'))
  const isNamed = wanted && (defined || isImported || (!isModule && bindsMain(body)))
  const main = await load(code, isModule, wanted, isNamed, sent)
  if (!wanted) return checkTaken(code, args)
  if (typeof main !== 'function') {
    throw new ProgramError("entrypoint 'main': the code defines no function main()")
  }
  return encode(await (args === undefined ? main() : main(args)), header.result_bytes)
}

// As much of each field as the host takes: see protocol.py.
const MOST_TYPE = 200
const MOST_MESSAGE = 10000
const MOST_TRACEBACK = 20000
const OWN_FRAME = /^\s+at .*(?:node_(?:runner|context)\.js|node:(?:internal|vm))/
const MOST_ERRORS = 100

function isError (value) {
  return util.types.isNativeError(value) || value instanceof Error
}

// Takes our own frames, and Node's between them, off the stack of an error, its causes and members.
function trim (error) {
  const pending = [error]
  for (let count = 0; pending.length && count < MOST_ERRORS; count++) {
    const each = pending.pop()
    if (!isError(each)) continue
    const { stack, cause, errors } = each
    if (typeof stack === 'string') {
      const kept = stack.split('\n').filter((line) => !OWN_FRAME.test(line)).join('\n')
      // Not of one that is frozen.
      if (kept !== stack) Reflect.set(each, 'stack', kept)
    }
    pending.push(cause, ...(Array.isArray(errors) ? errors : []))
  }
}

// What Node prints of what was thrown: an error with its own properties, causes and members,
// everything else as a value.
function inspected (error) {
  trim(error)
  const text = util.inspect(error)
  if (isError(error)) {
    // One without a frame stands in brackets.
    return text === `[${error.stack}]` ? text.slice(1, -1) : text
  }
  return text.includes('\n') ? `Uncaught:\n${text}` : `Uncaught ${text}`
}

function nameOf (error) {
  const { name } = error
  if (typeof name === 'string' && name && name !== 'Error') return name
  return Object.getPrototypeOf(error)?.constructor?.name || 'Error'
}

function shortened (text, most) {
  if (text.length <= most) return text
  const half = (most - 7) >> 1
  return `${text.slice(0, half)}\n[...]\n${text.slice(-half)}`
}

// Without halves of characters, which JSON cannot hold.
function wellFormed (text) {
  return Buffer.from(text).toString()
}

// What is printed of what ended a program, and the same as fields for the report of its end. The
// program may have made it so that looking at it fails.
function described (error) {
  let text = 'Uncaught'
  let type = 'Error'
  let message = ''
  let isOurs = false
  try {
    isOurs = error instanceof ProgramError
    text = isOurs ? error.message : inspected(error)
    if (isError(error)) {
      type = isOurs ? 'ProgramError' : nameOf(error)
      message = String(error.message)
    } else {
      type = error === null ? 'null' : typeof error === 'object' ? nameOf(error) : typeof error
      message = typeof error === 'string' ? error : util.inspect(error)
    }
  } catch {}
  const fields = {
    type: wellFormed(String(type).slice(0, MOST_TYPE)),
    message: wellFormed(shortened(message, MOST_MESSAGE)),
    traceback: isOurs ? '' : wellFormed(shortened(text, MOST_TRACEBACK))
  }
  return { text, part: ['exception', Buffer.from(JSON.stringify(fields))] }
}

function fail (error) {
  const { text, part } = described(error)
  fs.writeSync(2, text + '\n')
  report({ type: 'done', exit_code: 1 }, [part])
  process.reallyExit(1)
}

function writeFiles (parts) {
  try {
    for (const [name, content] of parts) {
      if (!name.startsWith('file:')) continue
      fs.mkdirSync(path.dirname(name.slice(5)), { recursive: true })
      fs.writeFileSync(name.slice(5), content)
      parts.delete(name)
    }
  } catch (error) {
    fail(new ProgramError(`The input files cannot be written: ${error.message}`))
  }
}

function beContext ({ header, parts }) {
  const context = new Module(path.join(path.dirname(__filename), 'node_context.js'), null)
  context.filename = context.id
  context.paths = []
  context._compile(parts.get('runner').toString(), context.id)
  context.exports({
    job: JOB, report, encode, toJson, callsMain, wantsArguments, checkTaken, acorn, described, ProgramError,
    useProxy
  }, header)
}

// The proxy is known only now, and this interpreter is older. Its text is there where files are not.
function useProxy () {
  if (process.env.NODE_USE_ENV_PROXY !== '1') return
  if (module.proxy) new Module('node_proxy.js', null)._compile(module.proxy, 'node_proxy.js')
  else require('./node_proxy.js')
}

function serve () {
  acorn.parse('function main () {}', SCRIPT)
  report({ type: 'ready' })
  const job = readFrame()
  lendArtifacts()
  // What was written must not be lost when the process exits before the pipes had room for it.
  for (const stream of [process.stdout, process.stderr]) stream._handle?.setBlocking(true)
  if (job.header.type === 'context') return beContext(job)
  Object.assign(process.env, job.header.environment)
  useProxy()
  const sent = [...job.parts.keys()].filter((name) => name.startsWith('file:')).map((name) => name.slice(5))
  writeFiles(job.parts)
  let result
  const emit = process.emit
  // Not a listener, because the program's own come later and may still print or set the exit code.
  process.emit = function (event, ...values) {
    const handled = Reflect.apply(emit, this, [event, ...values])
    if (event === 'exit') {
      const code = process.exitCode ?? values[0]
      report({ type: 'done', exit_code: code & 0xff }, result && code === 0 ? [['result', result]] : [])
    }
    return handled
  }
  process.on('uncaughtException', fail)
  run(job, sent).then((value) => {
    result = value
    // After main() nobody waits for timers it left behind; a script runs until nothing is left.
    if (result !== undefined) process.exit()
  }, fail)
}

serve()
