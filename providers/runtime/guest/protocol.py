"""What host and guest say to each other once a sandbox is kept. Frames are those of `wire`.

The first frame that a warm sandbox is sent decides what it is: a job makes it a single run, and
`{"op": "keep"}` a sandbox that stays. From then on

    host   {"id": n, "op": name, ...}           one operation; n is new, and not to be guessed
    guest  {"id": n, "seq": k, "event": ...}    k counts from 0; `done` and `failed` end it

Operations that stream have a credit: what the guest may send before the host has said `credit`
again. An event costs its parts and EVENT_COST, so that neither long nor many events fill a host's
memory. A guest that sends more, counts wrongly, or answers what was not asked is ended. What waits
for credit is not read from its pipe, so that the program waits as it would for any slow reader;
a run is the exception, whose output has a bound of its own and is dropped beyond it.

    keep         environment, memory_bytes; commands: language -> argv of its interpreter;
                 start_seconds: for one to be ready;
                 lasting: marker, seconds; or none   done: contexts
    run          context, timeout, limits, environment, credit, tools; parts code, arguments,
                 file:PATH                           stdout, stderr (part data), output (parts: MIME
                                                     types), call (parts call, name, arguments),
                                                     done: as the answer of a single run, and
                                                     context_kept
    interrupt    target: a context                   done: stopped
    context.create   language, cwd, context          done: context
    context.destroy, context.restart   context       done: found | context
    context.list                                     done: contexts
    spawn        argv | shell, cwd, environment, user, stdin, pty, timeout
                                                     done: pid, at once; `follow` has the rest
    follow       pid, after, credit                  stdout, stderr (at, part data), done: process
    process.list                                     done: processes
    stdin        pid, close; part data               done, when the process has room for it
    signal       pid, signal                         done: found
    resize       pid, columns, rows                  done
    file.list    path, depth, credit                 entries (part data), done: count
    file.stat    path                                done: entry, null where there is nothing
    file.mkdir, file.remove   path                   done: found
    file.move    path, target                        done: entry
    file.read    path, offset, length, credit        data (part data), done: entry
    file.write   path, mode, metadata                taken for each `data`; done: entry
    file.watch   path, credit                        ready; change: type, path, former; until `stop`
    file.changes mark, thorough, credit              entries, removed (part data), done: mark,
                                                     complete, count, gone, unseen
    file.pack    path, credit; part only             data; with `only` also held, kept, dropped;
                                                     done: count, skipped
    data         target: an operation; part data     nothing of its own
    end          target: an operation                nothing of its own
    file.unpack  path                                as file.write; done: count
    credit       target: an operation, bytes         nothing
    stop         target: an operation                that operation's done
    memory                                           done: bytes, null where others bound it
                                                     disk, disk_total: bytes of its files
    reset                                            done: contexts
    close                                            nothing: the guest ends
    lease        seconds                             nothing
    resume       echo, seconds                       the echo's bytes, then done: contexts

A `lasting` sandbox stays when its channel is cut off, which can be in the middle of a frame, both
ways. Another host says the 32 bytes of `marker` and then `resume`; the guest drops whatever came
before the marker and has not been said, stops what was under way, and says the bytes of `echo`,
before which the host drops everything. Contexts and processes stay. Without another `lease` it ends
after `seconds`. `marker` and `echo` are random, in hexadecimal digits; `resume` is said after a
marker alone.

`credit`, `stop`, `data` and `end` are for a `target` that is under way, and have no id. Without a
`credit` an operation sends no events. What the guest sends comes in any order between operations.

`tools` are the names that a run may call, where there are any. Of a `call` the part `call` is a
number that no other has which waits for its answer, which is `data` with the part `answer:NUMBER`:
JSON, {"result": value} or {"error": text}. A guest answers itself what is over the bounds below.

`order` of a run's answer says how stdout and stderr came: [[1 or 2, bytes], ...] of what was kept,
where `order_cut` is false. `context_kept` says whether what earlier runs left in the context was
there for this one, and is there still.

An entry is {path, type, size, mode, modified, target}, see `sandbox.FileEntry`, and of an absolute
path perhaps `end` ({path, type, mode}) and `metadata`; the part of `entries` is a JSON array of
them, for a header has too little room. Paths and `cwd` are relative to the workspace, or absolute.
With HOME in its environment a kept sandbox has programs begin in the workspace by that name, where
it is one (`root.HOME`). Paths are text; a byte that is not UTF-8 is the surrogate U+DC80 to U+DCFF
in it (os.fsdecode), in JSON its escape `\\udcXX`.

`removed` is a JSON array of paths. `only` is one, too: an archive of just these. Of it a file that
is too large to be read at once comes as `held`, and `kept` or `dropped` says whether it was the
same until its end. `unseen` is a list of folders that cannot be looked into; "" is the workspace,
and stands for more of them than can be said.

The part `exception` of a run's answer is JSON, {type, message, traceback}: what ended the program,
as it says itself. It is there where the exit code is another than 0 and something is known.

`failed` has `reason`, and `field` where one of the operation's is at fault; `code` is `refused`,
`missing` or `exhausted`.
"""

# What a guest of another process has to speak for us to go on with it. Raised by what it could not
# understand.
VERSION = 1

EVENT_COST = 128
# The most bytes of data in one frame, either way, and how many frames the host sends ahead.
CHUNK_BYTES = 64 * 1024
AHEAD = 4
# What an operation is given at first, and again whenever half of it is used.
CREDIT = 512 * 1024

# How many paths an archive of single ones may be asked for, and in how many bytes.
MOST_CHOSEN, CHOSEN_BYTES = 50_000, 8 * 1024 * 1024
# Entries of a workspace whose changes are told, and characters of their paths and targets.
MOST_KNOWN, KNOWN_CHARACTERS = 50_000, 4 * 1024 * 1024

# Folders that are said not to be seen into, and characters of their paths.
MOST_UNSEEN, UNSEEN_CHARACTERS = 50, 16 * 1024

# Bounds of the calls of tools: bytes of JSON of one's arguments and of its answer, calls of a run,
# those of it that wait at once, and how many are refused before their run loses its context.
CALL_BYTES, CALL_ANSWER_BYTES = 32 * 1024, 256 * 1024
MOST_CALLS, MOST_WAITING_CALLS, MOST_REFUSED_CALLS = 100, 8, 1000
NAME_BYTES = 64

DEFAULT_CONTEXT = "default"
# How long what was interrupted, or has met its deadline, may take to stop and keep its state.
STOP_SECONDS = 1.0
# Output of a process that is kept for whoever follows it later.
KEPT_OUTPUT_BYTES = 1024 * 1024
# What may be there at once in one sandbox, and operations under way.
MOST_CONTEXTS, MOST_PROCESSES, MOST_OPERATIONS = 16, 64, 128
