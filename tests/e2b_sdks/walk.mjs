// Every method of E2B's SDK for JavaScript; walk.py is the same in Python, and says what is printed.

import assert from 'node:assert/strict'

const sdk = await import(process.env.E2B_SDK)
const { Sandbox, Template, Volume, Secret } = sdk
const walker = process.argv[3]
const SECONDS = 60

const FIGURE = `
import matplotlib.pyplot as plt, pandas
plt.plot([1, 2], [3, 4], label="l")
plt.show()
pandas.DataFrame({"a": [1, 2]})
`
// What the declarations call private or protected, and what asks nobody.
const PRIVATE = new Set([
  'getJupyterRequestUrl', 'handleRequestError', 'includeDiagnostics', 'jupyterUrl', 'resolveApiOpts',
  'createSandbox', 'forkSandbox', 'connectSandbox', 'resolveOpts', 'boundOpts', 'getFullInfo',
  'start', 'flushDecoders', 'iterateEvents', 'handleEvents', 'runGit', 'runShell', 'getRemoteUrl',
  'resolveRemoteName', 'withRemoteCredentials', 'hasUpstream', 'fill', 'iamToken', 'toJSON', 'toDockerfile',
  'watchDirSupported', 'fileUrl'
])

function publicOf (of, group) {
  const found = new Set()
  for (let each = of; each && each !== Object.prototype && each !== Function.prototype; each = Object.getPrototypeOf(each)) {
    for (const [name, { value }] of Object.entries(Object.getOwnPropertyDescriptors(each))) {
      if (typeof value !== 'function' || name === 'constructor' || PRIVATE.has(name)) continue
      found.add(`${group}.${name}`)
    }
  }
  return found
}

const told = new Set()

function tell (method, outcome, said = '') {
  told.add(method)
  console.log(JSON.stringify({ method, outcome, said }))
}

function works (names) {
  for (const name of names.split(' ')) tell(name, 'works')
}

async function refused (names, call) {
  try {
    await call()
  } catch (error) {
    for (const name of names.split(' ')) tell(name, 'refused', `${error.constructor.name}: ${error.message}`)
    return
  }
  throw new Error(`${names}: was not refused`)
}

async function until (look) {
  for (let tries = 0; !look(); tries++) {
    assert(tries < SECONDS * 20, 'nothing has come')
    await new Promise((resolve) => setTimeout(resolve, 50))
  }
}

async function walkSandboxes () {
  const sandbox = await Sandbox.create({ timeoutMs: 300_000, metadata: { walk: walker }, envs: { OF_SANDBOX: '1' } })
  works('Sandbox.create')
  assert(await sandbox.isRunning())
  works('Sandbox.isRunning')
  const again = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 200_000 })
  assert.deepEqual((await again.getInfo()).metadata, { walk: walker })
  works('Sandbox.connect Sandbox.getInfo')
  await sandbox.setTimeout(280_000)
  works('Sandbox.setTimeout')
  assert((await sandbox.getMetrics())[0].memUsed > 0)
  works('Sandbox.getMetrics')
  const pages = Sandbox.list({ query: { metadata: { walk: walker } }, limit: 1 })
  const seen = []
  while (pages.hasNext) seen.push(...await pages.nextItems())
  assert.deepEqual(seen.map((each) => each.sandboxId), [sandbox.sandboxId])
  works('Sandbox.list SandboxPaginator.nextItems')
  assert(sandbox.getHost(3000).includes(sandbox.sandboxId))
  works('Sandbox.getHost')
  sandbox.getMcpUrl()
  works('Sandbox.getMcpUrl')
  await refused('Sandbox.getMcpToken', () => sandbox.getMcpToken())
  const { snapshotId } = await sandbox.createSnapshot()
  const taken = await sandbox.listSnapshots().nextItems()
  assert.deepEqual(taken.map((each) => each.snapshotId), [snapshotId])
  assert(await Sandbox.deleteSnapshot(snapshotId))
  assert(!await Sandbox.deleteSnapshot(snapshotId))
  works('Sandbox.createSnapshot Sandbox.deleteSnapshot')
  works('Sandbox.listSnapshots SnapshotPaginator.nextItems')
  const [fork] = await sandbox.fork()
  await fork.kill()
  works('Sandbox.fork')
  await sandbox.updateNetwork({ denyOut: ['0.0.0.0/0'] })
  works('Sandbox.updateNetwork')
  return sandbox
}

async function walkFiles ({ files }) {
  assert.equal((await files.write('a/one.txt', '1')).path, '/home/user/a/one.txt')
  const both = [{ path: 'a/two', data: new Uint8Array([0, 255]).buffer }, { path: '/home/user/a/b/three', data: '3' }]
  assert.equal((await files.write(both)).length, 2)
  assert.equal((await files.writeFiles([{ path: 'a/four', data: '4' }])).length, 1)
  assert.equal(await files.read('~/a/one.txt'), '1')
  assert.deepEqual([...await files.read('a/two', { format: 'bytes' })], [0, 255])
  assert.equal((await files.read('a/two', { format: 'blob' })).size, 2)
  const pieces = []
  for await (const piece of await files.read('a/two', { format: 'stream' })) pieces.push(...piece)
  assert.deepEqual(pieces, [0, 255])
  await files.write('packed', 'p'.repeat(100_000), { gzip: true })
  assert.equal(await files.read('packed', { gzip: true }), 'p'.repeat(100_000))
  await files.write('whole', 'w'.repeat(1000), { useOctetStream: true })
  assert.equal((await files.getInfo('whole')).size, 1000)
  const names = (await files.list('a', { depth: 2 })).map((each) => each.name).sort()
  assert.deepEqual(names, ['b', 'four', 'one.txt', 'three', 'two'])
  assert(await files.exists('a/b/three'))
  assert(await files.makeDir('made'))
  assert(!await files.makeDir('made'))
  assert.equal((await files.rename('a/two', 'made/two')).path, '/home/user/made/two')
  await files.remove('a')
  assert(!await files.exists('a'))
  works('files.write files.writeFiles files.read files.getInfo files.list files.exists')
  works('files.makeDir files.rename files.remove')
  const seen = []
  const watch = await files.watchDir('made', (event) => { seen.push(event.name) })
  await files.write('made/new', 'n')
  await until(() => seen.includes('new'))
  await watch.stop()
  works('files.watchDir watch.stop')
}

async function walkLinks (sandbox) {
  const form = new FormData()
  form.append('file', new Blob(['linked']), 'l')
  const put = await fetch(await sandbox.uploadUrl('linked.txt', { useSignatureExpiration: 60 }), { method: 'POST', body: form })
  assert.equal(put.status, 200)
  assert.equal(await (await fetch(await sandbox.downloadUrl('linked.txt'))).text(), 'linked')
  works('Sandbox.uploadUrl Sandbox.downloadUrl')
}

async function walkCommands ({ commands }) {
  let heard = ''
  const script = 'echo $OF_SANDBOX $OWN; pwd; echo e >&2'
  const options = { envs: { OWN: '2' }, cwd: '/home/user/made', onStdout: (text) => { heard += text } }
  const done = await commands.run(script, options)
  assert.deepEqual([done.stdout, done.stderr, done.exitCode], ['1 2\n/home/user/made\n', 'e\n', 0])
  assert.equal(heard, done.stdout)
  await assert.rejects(commands.run('exit 3', { user: 'user' }), (error) => error instanceof sdk.CommandExitError && error.exitCode === 3)
  works('commands.run')
  const talking = await commands.run('read a; echo got $a; cat', { background: true, stdin: true })
  assert((await commands.list()).some((each) => each.pid === talking.pid))
  await commands.sendStdin(talking.pid, 'abc\n')
  await talking.sendStdin('more')
  await talking.closeStdin()
  assert.equal((await talking.wait()).stdout, 'got abc\nmore')
  works('commands.list commands.sendStdin handle.sendStdin handle.closeStdin handle.wait')
  const left = await commands.run('read a; echo late', { background: true, stdin: true })
  await left.disconnect()
  const found = await commands.connect(left.pid)
  await commands.closeStdin(left.pid)
  // Its input was at its end: that is how `read` says so.
  assert.equal((await found.wait()).stdout, 'late\n')
  works('handle.disconnect commands.connect commands.closeStdin')
  const first = await commands.run('sleep 600', { background: true })
  assert(await commands.kill(first.pid))
  await assert.rejects(first.wait())
  const second = await commands.run('sleep 600', { background: true })
  assert(await second.kill())
  await assert.rejects(second.wait())
  works('commands.kill handle.kill')
}

async function walkTerminals ({ pty }) {
  let shown = ''
  const onData = (data) => { shown += Buffer.from(data).toString() }
  const terminal = await pty.create({ rows: 20, cols: 60, onData })
  await pty.resize(terminal.pid, { rows: 31, cols: 91 })
  await terminal.disconnect()
  const again = await pty.connect(terminal.pid, { onData })
  await pty.sendInput(terminal.pid, Buffer.from('stty size\nexit\n'))
  await again.wait()
  assert(shown.includes('31 91'), shown)
  works('pty.create pty.resize pty.connect pty.sendInput')
  const last = await pty.create({ rows: 20, cols: 60, onData })
  assert(await pty.kill(last.pid))
  await last.wait().catch(() => {})
  works('pty.kill')
}

async function walkGit ({ git, files }) {
  const at = '/home/user/repository'
  await git.init(`${at}.git`, { bare: true })
  await git.init(at, { initialBranch: 'main' })
  await git.configureUser('A', 'a@example.org')
  await git.setConfig('core.autocrlf', 'false', { scope: 'local', path: at })
  assert.equal(await git.getConfig('core.autocrlf', { scope: 'local', path: at }), 'false')
  await files.write(`${at}/a.txt`, 'a')
  await git.add(at)
  await git.commit(at, 'first')
  assert.equal((await git.status(at)).currentBranch, 'main')
  await git.createBranch(at, 'other')
  await git.checkoutBranch(at, 'main')
  await git.deleteBranch(at, 'other', { force: true })
  assert.deepEqual((await git.branches(at)).branches, ['main'])
  await files.write(`${at}/a.txt`, 'b')
  await git.restore(at, { paths: ['a.txt'] })
  assert.equal(await files.read(`${at}/a.txt`), 'a')
  await git.reset(at, { mode: 'hard' })
  await git.remoteAdd(at, 'origin', 'file:///home/user/repository.git')
  assert(await git.remoteGet(at, 'origin'))
  await git.push(at, { remote: 'origin', branch: 'main' })
  await git.pull(at, { remote: 'origin', branch: 'main' })
  await git.clone('file:///home/user/repository.git', { path: '/home/user/cloned' })
  await git.dangerouslyAuthenticate({ username: 'u', password: 'p', host: 'git.example.org' })
  works([...publicOf(Object.getPrototypeOf(git), 'git')].sort().join(' '))
}

async function walkCells (sandbox) {
  const printed = []
  const first = await sandbox.runCode("import sys\nx = 41\nprint('out')\nprint('err', file=sys.stderr)\nx + 1", {
    onStdout: (message) => { printed.push(message.line) }
  })
  assert.deepEqual([first.text, first.error, printed, first.logs.stderr], ['42', undefined, ['out\n'], ['err\n']])
  assert.equal((await sandbox.runCode("import os; x, os.environ['OWN']", { envs: { OWN: '1' } })).text, "(41, '1')")
  assert.equal((await sandbox.runCode('1/0')).error.name, 'ZeroDivisionError')
  const drawn = await sandbox.runCode(FIGURE)
  assert.equal(drawn.error, undefined)
  const [shown, frame] = drawn.results
  assert(shown.png)
  assert.deepEqual(shown.chart.elements[0].points, [[1, 3], [2, 4]])
  assert.deepEqual([frame.data, frame.isMainResult], [{ a: [1, 2] }, true])
  assert.equal((await sandbox.runCode('const a = 5; a * 2', { language: 'javascript' })).text, '10')
  assert.equal((await sandbox.runCode('const b: number = 5; b * 2', { language: 'typescript' })).text, '10')
  assert.deepEqual((await sandbox.runCode('echo hi', { language: 'bash' })).logs.stdout, ['hi\n'])
  works('Sandbox.runCode')
  const made = await sandbox.createCodeContext({ cwd: '/home/user/made', language: 'python' })
  assert.equal((await sandbox.runCode('import os; z = 1; os.getcwd()', { context: made })).text, '/home/user/made')
  assert((await sandbox.listCodeContexts()).some((each) => each.id === made.id))
  await sandbox.restartCodeContext(made)
  assert.equal((await sandbox.runCode('z', { context: made })).error.name, 'NameError')
  await sandbox.removeCodeContext(made)
  works('Sandbox.createCodeContext Sandbox.listCodeContexts Sandbox.restartCodeContext Sandbox.removeCodeContext')
}

async function walkEnd (sandbox) {
  await sandbox.files.write('kept.txt', 'kept')
  assert(await sandbox.pause())
  assert(!await sandbox.betaPause())
  works('Sandbox.pause Sandbox.betaPause')
  const again = await Sandbox.connect(sandbox.sandboxId)
  assert.equal(await again.files.read('kept.txt'), 'kept')
  assert(await again.kill())
  assert(!await again.kill())
  works('Sandbox.kill')
}

async function walkSecrets () {
  const name = `of-${walker.toLowerCase().replace(/[^a-z0-9]/g, '-')}`
  const made = await Secret.create(name, 'a value of it')
  works('Secret.create')
  assert((await Secret.list().nextItems()).some((each) => each.name === name))
  works('Secret.list')
  assert.equal((await Secret.getInfo(made.secretId)).name, name)
  works('Secret.getInfo')
  assert.equal((await Secret.update(name, 'another value')).version, made.version + 1)
  works('Secret.update')
  assert(await Secret.destroy(name))
  works('Secret.destroy')
  assert(!await Secret.exists(name))
  works('Secret.exists')
}

async function walkOthers () {
  await refused('Volume.create', () => Volume.create('v'))
  await refused('Volume.connect', () => Volume.connect('v'))
  await refused('Volume.list', () => Volume.list())
  await refused('Volume.getInfo', () => Volume.getInfo('v'))
  await refused('Volume.destroy', () => Volume.destroy('v'))
  for (const name of volumes) if (!told.has(name)) tell(name, 'refused', 'There is no volume to ask it of.')
}

async function walkTemplates () {
  const name = `walk-${crypto.randomUUID().slice(0, 8)}`
  assert(!await Template.exists(name))
  assert(!await Template.aliasExists(name))
  works('Template.exists Template.aliasExists')
  const made = Template().fromBaseImage().setEnvs({ OF_TEMPLATE: '1' })
  await Template.build(made, name)
  works('Template.build')
  const info = await Template.buildInBackground(made, name)
  works('Template.buildInBackground')
  await until(async () => {
    const { status, reason } = await Template.getBuildStatus(info)
    assert(status !== 'error', reason)
    return status === 'ready'
  })
  works('Template.getBuildStatus')
  await Template.assignTags(name, ['stable'])
  assert((await Template.getTags(name)).map(each => each.tag).join() === 'stable')
  await Template.removeTags(name, ['stable'])
  assert((await Template.getTags(name)).length === 0)
  works('Template.assignTags Template.getTags Template.removeTags')
  const sandbox = await Sandbox.create(name, { timeoutMs: 300_000 })
  try {
    assert((await sandbox.commands.run('echo $OF_TEMPLATE')).stdout === '1\n')
  } finally {
    await sandbox.kill()
  }
}

const volumes = new Set([...publicOf(Volume, 'Volume'), ...publicOf(Volume.prototype, 'Volume')])
const sandbox = await walkSandboxes()
try {
  const handle = await sandbox.commands.run('true', { background: true })
  await handle.wait()
  await sandbox.files.makeDir('empty')
  const watch = await sandbox.files.watchDir('empty', () => {})
  await watch.stop()
  const methods = new Set([
    ...publicOf(Sandbox, 'Sandbox'), ...publicOf(Sandbox.prototype, 'Sandbox'),
    ...['commands', 'pty', 'files', 'git'].flatMap((name) => [...publicOf(Object.getPrototypeOf(sandbox[name]), name)]),
    ...publicOf(Object.getPrototypeOf(handle), 'handle'), ...publicOf(Object.getPrototypeOf(watch), 'watch'),
    ...publicOf(Template, 'Template'), ...volumes, ...publicOf(Secret, 'Secret'),
    'SandboxPaginator.nextItems', 'SnapshotPaginator.nextItems'
  ])
  const versions = ['2.51.0', '2.8.0']
  console.log(JSON.stringify({ versions, methods: [...methods].sort() }))
  await walkFiles(sandbox)
  await walkLinks(sandbox)
  await walkCommands(sandbox)
  await walkTerminals(sandbox)
  await walkGit(sandbox)
  await walkCells(sandbox)
  await walkEnd(sandbox)
  await walkSecrets()
  await walkTemplates()
} finally {
  await sandbox.kill()
}
await walkOthers()
