"""What the processes say to each other: messages (one module per receiving process), codec, queues.

Every process owns one inbox, an `ipc://` socket in the private run directory; whoever has something for it opens an
outbox to that address. A message is one small msgpack header and one raw frame for each array or byte string. Loops use
`Inbox`, `AsyncInbox` and `Outbox` and never name ZeroMQ.
"""
