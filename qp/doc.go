// SPDX-License-Identifier: Apache-2.0

// Package qp is the protocol: queue pairs, completion queues and shared
// receive queues of the InfiniBand Architecture, with no goroutine, no I/O and
// no clock of its own.
//
// A QP is three small machines, each the only writer of its state:
//
//   - the requester (requester.go) turns send work requests into packets,
//   - the completer (completer.go) takes the peer's acknowledgements and READ
//     responses and completes work requests in order,
//   - the responder (responder.go, response.go) takes the peer's requests,
//     executes them and queues what it owes in PSN order.
//
// Everything a QP does happens inside Handle, Tick, Run or EndBatch, called by
// the one who holds the baton of the shard the QP belongs to. What a QP needs
// from its shard (memory, egress, time, event sink) hangs off Env. So the same
// machines run on a TAP device and in a test with virtual time.
//
// Work queues and completion queues are rings in memory outside the Go heap
// (ring.go), shared with whoever posts and polls: the Go API of package
// provider, or a C library. Their layout is written down in ring.go and nowhere
// else.
//
// Clauses are cited as "IBA x.y.z": InfiniBand Architecture Specification
// Volume 1, Release 1.4; RoCEv2 is its Annex A17.
package qp
