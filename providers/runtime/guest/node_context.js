'use strict'
// A Node that runs one piece of code after the other, and keeps what they leave behind. Its text
// is given to node_runner.js, which calls what is exported here with what the two share.

const net = require('net')
const path = require('path')
const util = require('util')
const { pathToFileURL } = require('url')
const vm = require('vm')
const { Worker } = require('worker_threads')
const Module = require('module')
const { processTopLevelAwait } = require('internal/repl/await')
const SyncWriteStream = require('internal/fs/sync_write_stream')

const SYNTAX = { ecmaVersion: 'latest', allowHashBang: true, allowAwaitOutsideFunction: true }
const INTERRUPTED = 130
const soon = setImmediate
const STOP = 5
const BREAKING = -1n
// A signal breaks off what a cell runs before its first await, and is heard by whoever is idle. What
// loops later is broken off from here: another thread, whose time has come when the cell that it is
// told of is still the one that runs.
const BREAKER = `
const { parentPort, workerData: { running, stop, patience } } = require('worker_threads')
const { Session } = require('inspector')
function stopped (number) {
  if (Atomics.compareExchange(running, 0, number, ${BREAKING}n) !== number) return
  const session = new Session()
  session.connectToMainThread()
  session.post('Runtime.terminateExecution', () => {
    session.disconnect()
    Atomics.store(running, 0, 0n)
    parentPort.postMessage(null)
  })
}
new (require('net').Socket)({ fd: stop, readable: true, writable: false }).on('data', (data) => {
  setTimeout(stopped, patience, data.readBigInt64BE(data.length - 8))
})
`
const PATIENCE_MS = 100
// Where a TypeScript compiler may be for a Node that does not know the language itself.
const NO_COMPILER = `If this is TypeScript: Node ${process.version} does not support it, and the package ` +
  'typescript is missing. An administrator can add it (Debian: node-typescript), or Node 22.13 or newer.'
// What JavaScript has nowhere: a type behind a name, and declarations of types.
const TYPED = /[\w)\]]\??\s*:\s*[A-Za-z_$][\w$.<>[\] |]*[=,);{]|\b(interface|type|enum|namespace|declare|abstract|readonly|private|public|protected|as|satisfies)\s+[\w$]|\w<[\w$ ,[\]|]+>\s*[({]/
// As display.py has it.
const TEXT_LIMIT = 200000
const COMPILERS = ['typescript', '/usr/share/nodejs/typescript', '/usr/lib/node_modules/typescript']

class Exit {
  constructor (code) { this.code = code }
}

// A call was refused, or its answer is an error.
class ToolError extends Error {
  constructor (message) {
    super(message)
    this.name = 'ToolError'
  }
}

module.exports = function serve (shared, header) {
  const {
    job, report, encode, toJson, callsMain, wantsArguments, checkTaken, acorn, described, ProgramError,
    useProxy
  } = shared
  let write = process.stderr.write.bind(process.stderr)
  let running = null
  let isInScript = false
  let count = 0
  // The number of the run that may be broken off.
  const stoppable = new BigInt64Array(new SharedArrayBuffer(8))
  const workerData = { running: stoppable, stop: STOP, patience: PATIENCE_MS }
  const breaker = new Worker(BREAKER, { eval: true, env: {}, workerData })
  // Where there is none, such a loop costs the context.
  const watched = new Promise((resolve) => { breaker.on('online', resolve).on('error', resolve) })
  breaker.unref()

  Object.assign(process.env, header.environment)
  useProxy()
  if (header.cwd) {
    require('fs').mkdirSync(header.cwd, { recursive: true })
    process.chdir(header.cwd)
    process.env.PWD = header.cwd[0] === '/' ? header.cwd : process.cwd()
  }
  process.argv.length = 1
  globalThis.module = new Module(path.resolve('main.js'), null)
  globalThis.exports = globalThis.module.exports
  globalThis.require = Module.createRequire(path.resolve('main.js'))
  process.exit = process.reallyExit = (code = process.exitCode ?? 0) => {
    running?.end({ code: code & 0xff })
    throw new Exit(code & 0xff)
  }
  process.on('SIGINT', () => running?.end({ code: INTERRUPTED }))
  process.on('uncaughtException', (error) => {
    if (!isExit(error)) tell(error)
  })

  function isExit (error) {
    try {
      return error instanceof Exit
    } catch {
      // A proxy, to which nothing can be done.
      return false
    }
  }

  // A stream that a cell has ended is there for the next one. Node's own say later that they have
  // not been ended, and write nothing any more.
  const finished = new Set()
  for (const stream of [process.stdout, process.stderr]) stream.once('finish', () => finished.add(stream))
  function restoreStreams () {
    for (const [name, fd] of [['stdout', 1], ['stderr', 2]]) {
      const stream = process[name]
      if (!finished.has(stream) && !stream?.writableEnded && !stream?.destroyed) continue
      const fresh = new SyncWriteStream(fd, { autoClose: false })
      Object.defineProperty(process, name, { configurable: true, enumerable: true, get: () => fresh })
      console[`_${name}`] = fresh
      if (name === 'stderr') write = fresh.write.bind(fresh)
    }
  }

  // The same as a part of the report of the cell's end.
  function tell (error) {
    const { text, part } = described(error)
    write(text + '\n')
    return part
  }

  // The module `tools` of the cell that runs. Each call of its functions is a report, and the answer
  // comes by the socket, as the cells do.
  let tools = null
  let calls = 0
  const unanswered = new Map()
  const load = Module._load
  Module._load = function (request, ...rest) {
    // A file of the program's may have the name where a cell has no tools.
    return request === 'tools' && tools ? tools : Reflect.apply(load, this, [request, ...rest])
  }

  function offer ({ tools: names, call_bytes: most }) {
    unanswered.clear()
    tools = names ? { ToolError } : null
    for (const name of names ?? []) {
      Object.assign(tools, { [name]: async (args = {}) => call(name, args, most) })
    }
  }

  async function call (name, args, most) {
    if (!tools || !Object.hasOwn(tools, name)) throw new ToolError(`${name} is not a tool of this run`)
    let body
    try {
      if (args === null || typeof args !== 'object' || Array.isArray(args)) throw new TypeError('not an object')
      body = toJson(args)
    } catch (error) {
      throw new ToolError(`the arguments of ${name} are not JSON: ${error.message}`)
    }
    if (body.length > most) throw new ToolError(`the arguments of ${name} are more than ${most} bytes of JSON`)
    const mine = running
    // Whoever hears of it may interrupt at once, and the end of a script is no time for a signal:
    // its own handler is gone by then, and ours is not back.
    if (isInScript) await new Promise((resolve) => soon(resolve))
    if (running !== mine) throw new ToolError(`${name} is not a tool of this run`)
    const number = ++calls
    report({ type: 'call', number: running.number, call: number, name }, [['arguments', body]])
    const told = JSON.parse(await new Promise((resolve) => unanswered.set(number, resolve)))
    if (told.error !== undefined) throw new ToolError(told.error)
    return told.result
  }

  // What a later cell may declare again, so that code can be run twice: `var` in place of const,
  // let and class, and imports as what they are without a module.
  function prepare (code) {
    let source = code
    let body = parsed(source)
    if (body === null) {
      source = withoutTypes(code)
      body = source === null ? null : parsed(source)
    }
    // Node's own message for the syntax error, with the caller's line, comes from compiling it.
    if (body === null) return { source: code, body: [] }
    for (const node of [...body].reverse()) {
      const text = source.slice(node.start, node.end)
      const replaced = redeclarable(node, text)
      if (replaced !== text) source = source.slice(0, node.start) + replaced + source.slice(node.end)
    }
    const awaiting = processTopLevelAwait(source)
    return { source: awaiting ?? source, awaits: awaiting !== null, body }
  }

  function parsed (code) {
    for (const sourceType of ['script', 'module']) {
      try {
        return acorn.parse(code, { ...SYNTAX, sourceType }).body
      } catch {}
    }
    return null
  }

  // What is no JavaScript may be TypeScript: null where it is neither, or nothing here knows.
  function withoutTypes (code) {
    const warn = process.emitWarning
    process.emitWarning = () => {}
    try {
      for (const mode of Module.stripTypeScriptTypes ? ['strip', 'transform'] : []) {
        try {
          return Module.stripTypeScriptTypes(code, { mode })
        } catch {}
      }
    } finally {
      process.emitWarning = warn
    }
    const compiler = typescript()
    if (compiler === null) return null
    const { outputText, diagnostics } = compiler.transpileModule(code, {
      reportDiagnostics: true,
      compilerOptions: {
        target: compiler.ScriptTarget.ESNext,
        module: compiler.ModuleKind.ESNext,
        // A later cell may use what this one imports and does not.
        ...(parseInt(compiler.version) > 4
          ? { verbatimModuleSyntax: true }
          : { preserveValueImports: true, isolatedModules: true })
      }
    })
    if (diagnostics.some(({ file }) => file)) return null
    return outputText.replace(/^export \{\};?$/m, '')
  }

  // Node before 20.12 has no name for its own loader, and needs the scripts that ask for it alive.
  const importers = []
  function compiled (source, code) {
    const loader = vm.constants?.USE_MAIN_CONTEXT_DEFAULT_LOADER
    function load (name, _, attributes) {
      return loaderOfOurs().import(name, pathToFileURL(path.resolve('main.js')).href, attributes)
    }
    let script
    try {
      script = new vm.Script(source, {
        filename: `<cell ${count}>`,
        importModuleDynamically: loader ?? load
      })
    } catch (error) {
      throw hinted(error, code)
    }
    if (!loader && /\bimport\b/.test(source)) importers.push(script)
    return script
  }

  function loaderOfOurs () {
    try {
      return require('internal/process/esm_loader').esmLoader
    } catch {
      return require('internal/modules/esm/loader').getOrInitializeCascadedLoader()
    }
  }

  // Node's own error for what is no JavaScript, with what to do where it may be TypeScript.
  function hinted (error, code) {
    if (!(error instanceof SyntaxError) || Module.stripTypeScriptTypes || !TYPED.test(code) || typescript()) return error
    const { message, stack } = error
    error.message = `${message}. ${NO_COMPILER}`
    error.stack = stack.replace(message, () => error.message)
    return error
  }

  // The text of a value, and what was left out of it.
  function shown (value) {
    // A text in it that is longer is cut here as well, so that this is told.
    const text = util.inspect(value, { maxStringLength: TEXT_LIMIT + 1 })
    if (text.length <= TEXT_LIMIT) return { text, cut: [] }
    const reason = `cut: the first ${TEXT_LIMIT} characters are kept`
    return { text: `${text.slice(0, TEXT_LIMIT)}\n[${reason}]`, cut: [['text/plain', reason]] }
  }

  function typescript () {
    for (const place of COMPILERS) {
      try {
        return globalThis.require(place)
      } catch {}
    }
    return null
  }

  function redeclarable (node, text) {
    if (node.type === 'VariableDeclaration') return text.replace(/^(const|let)/, (word) => 'var'.padEnd(word.length))
    if (node.type === 'ClassDeclaration') return `var ${node.id.name} = ${text};`
    if (node.type !== 'ImportDeclaration') return text
    const source = JSON.stringify(node.source.value)
    const from = source === '"tools"' && tools ? `require(${source})` : `await import(${source})`
    const names = []
    let whole = ''
    for (const { type, local, imported } of node.specifiers) {
      if (type === 'ImportNamespaceSpecifier') whole = `var ${local.name} = ${from};`
      else names.push(`${type === 'ImportDefaultSpecifier' ? 'default' : imported.name}: ${local.name}`)
    }
    return names.length || !whole ? `${whole}var {${names}} = ${from};` : whole
  }

  async function evaluate (code, args) {
    count += 1
    const { source, awaits, body } = prepare(code)
    const script = compiled(source, code)
    if (args !== undefined) globalThis.arguments = args
    const former = globalThis.main
    const formerExport = globalThis.module.exports?.main
    let value
    isInScript = true
    try {
      value = script.runInThisContext({ breakOnSigint: true, displayErrors: false })
    } finally {
      isInScript = false
    }
    if (awaits) {
      value = await value
      if (/return \{ (__proto__: null, )?value: /.test(source)) value = value?.value
    }
    const shows = body.at(-1)?.type === 'ExpressionStatement'
    value = shows ? await value : undefined
    if (value !== undefined) {
      globalThis._ = value
      const { text, cut } = shown(value)
      report({ type: 'output', cut, number: running.number }, [['text/plain', Buffer.from(text)]])
    }
    if (args === undefined) return undefined
    const exported = globalThis.module.exports?.main
    const main = exported !== formerExport ? exported : globalThis.main
    // Code that is empty is there to call the main of an earlier cell.
    const isOwn = wantsArguments(body) || body.length === 0 || (main !== former && !callsMain(body))
    if (typeof main !== 'function' || !isOwn) return checkTaken(code, args)
    return encode(await main(args), running.resultBytes)
  }

  // Whoever is being broken off by now is this run, and nothing that comes after it.
  function settled (number) {
    if (Atomics.compareExchange(stoppable, 0, number, 0n) !== BREAKING) return undefined
    return new Promise((resolve) => {
      breaker.once('message', resolve)
      setImmediate(() => { while (Atomics.load(stoppable, 0) === BREAKING); })
    })
  }

  async function run ({ header, parts }) {
    const before = Object.keys(header.environment).map((name) => [name, process.env[name]])
    Object.assign(process.env, header.environment)
    const text = parts.get('arguments')?.toString()
    const args = text === undefined ? undefined : JSON.parse(text)
    process.exitCode = undefined
    restoreStreams()
    offer(header)
    const ended = new Promise((resolve) => {
      running = { number: header.number, resultBytes: header.result_bytes, end: resolve }
    })
    const number = BigInt(header.number)
    Atomics.store(stoppable, 0, number)
    report({ type: 'began', number: header.number })
    const evaluated = evaluate(parts.get('code').toString(), args).then(
      (result) => ({ code: (process.exitCode ?? 0) & 0xff, result }),
      (error) => {
        try {
          if (error instanceof Exit) return { code: error.code }
          if (error?.code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED') return { code: INTERRUPTED }
        } catch {
          // A proxy, to which nothing can be done.
        }
        return { code: 1, error: { thrown: error } }
      }
    )
    const { code, result, error } = await Promise.race([ended, evaluated])
    await settled(number)
    const ending = error === undefined ? [] : [tell(error.thrown)]
    running = null
    offer({})
    process.exitCode = undefined
    for (const [name, value] of before) {
      if (value === undefined) delete process.env[name]
      else process.env[name] = value
    }
    if (result && code === 0) ending.push(['result', result])
    report({ type: 'done', number: header.number, exit_code: code }, ending)
  }

  let received = Buffer.alloc(0)
  const waiting = []
  let busy = false
  const socket = new net.Socket({ fd: job, readable: true, writable: false })
  socket.on('data', (data) => {
    received = Buffer.concat([received, data])
    for (let frame = take(); frame !== null; frame = take()) {
      if (frame.header.type === 'answer') answered(frame)
      else waiting.push(frame)
    }
    // Not from here: a cell's tracebacks would end with the frames of this socket.
    soon(next)
  })
  socket.on('end', () => {
    try {
      process.emit('exit', 0)
    } finally {
      process.kill(process.pid, 'SIGKILL')
    }
  })

  function answered ({ header, parts }) {
    const resolve = unanswered.get(header.call)
    unanswered.delete(header.call)
    resolve?.(parts.get('answer').toString())
  }

  // Not by a chain of promises: with what is broken off, all that was due in that turn is forgotten.
  function next () {
    if (busy || waiting.length === 0) return
    busy = true
    run(waiting.shift()).then(() => { busy = false; next() })
  }

  function take () {
    if (received.length < 4) return null
    let at = 4 + received.readUInt32BE(0)
    if (received.length < at) return null
    const header = JSON.parse(received.subarray(4, at).toString())
    const size = header.parts.reduce((sum, [, length]) => sum + length, 0)
    if (received.length < at + size) return null
    const parts = new Map()
    for (const [name, length] of header.parts) {
      parts.set(name, received.subarray(at, at + length))
      at += length
    }
    received = received.subarray(at)
    return { header, parts }
  }

  watched.then(() => report({ type: 'ready' }))
}
