'use strict'

// Has fetch, http and https of Node.js use the proxy of HTTPS_PROXY, which they do by themselves
// only from Node 24 on. Each connection is a tunnel of its own.

const proxy = (() => {
  try {
    return new URL(process.env.HTTPS_PROXY)
  } catch {
    return null
  }
})()
const direct = (process.env.NO_PROXY || '').split(',').filter(Boolean)

function tunnel (host, port, done) {
  const net = require('net')
  const name = net.isIPv6(host) ? `[${host}]` : host
  const socket = net.connect(Number(proxy.port), proxy.hostname)
  let head = Buffer.alloc(0)
  const fail = (error) => {
    socket.destroy()
    done(error)
  }
  const read = (data) => {
    head = Buffer.concat([head, data])
    const end = head.indexOf('\r\n\r\n')
    if (end < 0) return head.length > 65536 && fail(new Error('the proxy sends no answer'))
    socket.removeListener('data', read)
    socket.removeListener('error', fail)
    socket.removeListener('end', closed)
    const [line] = head.toString('latin1', 0, end).split('\r\n')
    if (line.split(' ')[1] !== '200') {
      const reason = /^x-network-reason: (.*)$/im.exec(head.toString('latin1', 0, end))
      return fail(new Error(`${host}:${port}: ${reason ? reason[1] : line}`))
    }
    // What comes before there is a listener would be lost.
    socket.pause()
    const rest = head.subarray(end + 4)
    if (rest.length) socket.unshift(rest)
    done(null, socket)
    socket.resume()
  }
  const closed = () => fail(new Error('the proxy has closed the connection'))
  socket.on('data', read)
  socket.once('error', fail)
  socket.once('end', closed)
  socket.once('connect', () => {
    socket.write(`CONNECT ${name}:${port} HTTP/1.1\r\nHost: ${name}:${port}\r\n\r\n`)
  })
}

function connect (options, isSecure, done) {
  const host = (options.hostname || options.host || 'localhost').replace(/^\[(.*)\]$/, '$1')
  const port = Number(options.port) || (isSecure ? 443 : 80)
  tunnel(host, port, (error, socket) => {
    if (error || !isSecure) return done(error, socket)
    const net = require('net')
    const names = net.isIP(host) ? {} : { servername: options.servername || host }
    const secure = require('tls').connect({ ...options, ...names, host, port, socket, path: undefined })
    const fail = (failure) => done(failure)
    secure.once('error', fail)
    secure.once('secureConnect', () => {
      secure.removeListener('error', fail)
      done(null, secure)
    })
  })
}

function isDirect (options) {
  const host = (options.hostname || options.host || 'localhost').replace(/^\[(.*)\]$/, '$1')
  return Boolean(options.socketPath) || direct.includes(host)
}

function useProxy () {
  const http = require('http')
  const https = require('https')
  for (const [module, isSecure] of [[http, false], [https, true]]) {
    const create = module.globalAgent.createConnection
    module.globalAgent.createConnection = function (options, done) {
      if (isDirect(options)) return create.call(this, options, done)
      connect(options, isSecure, done)
    }
  }
  // To ask for it loads what makes the dispatcher of fetch.
  if (typeof Response === 'undefined') return
  const key = Symbol.for('undici.globalDispatcher.1')
  const Agent = globalThis[key]?.constructor
  if (Agent === undefined) return
  const own = globalThis[key]
  const proxied = new Agent({
    connect: (options, done) => connect(options, options.protocol === 'https:', done)
  })
  const dispatch = proxied.dispatch
  proxied.dispatch = function (options, handler) {
    const isOwn = isDirect({ hostname: new URL(options.origin).hostname })
    return isOwn ? own.dispatch(options, handler) : dispatch.call(this, options, handler)
  }
  globalThis[key] = proxied
}

// Node.js reads NODE_EXTRA_CA_CERTS when it starts, and may have been started before it was set. The
// sandbox's own authority is the last of that file.
let authority = null

function ownAuthority () {
  const file = process.env.NODE_EXTRA_CA_CERTS
  if (authority === null && file) {
    const found = require('fs').readFileSync(file, 'latin1').split(/(?=-----BEGIN CERTIFICATE-----)/)
    authority = found[found.length - 1]
  }
  return authority
}

function trustOwnAuthority () {
  const tls = require('tls')
  const create = tls.createSecureContext
  tls.createSecureContext = function (options) {
    const made = create.call(this, options)
    if (!options?.ca && ownAuthority() !== null) made.context.addCACert(authority)
    return made
  }
}

if (proxy !== null && process.env.NODE_USE_ENV_PROXY === '1') {
  trustOwnAuthority()
  const [major, minor] = process.versions.node.split('.').map(Number)
  if (major < 22 || (major === 22 && minor < 21) || major === 23) useProxy()
}
