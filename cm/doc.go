// SPDX-License-Identifier: Apache-2.0

// Package cm is connection management: the state machines by which two ports agree on a
// connection of queue pairs, end it, and find datagram services (IBA 12, and annex A11 for
// what RDMA CM lays on top).
//
// An [Agent] is one port's. It does no I/O, starts no goroutine and knows no clock: messages
// and times are handed to it, all times being ns of one monotonic clock, and it answers by
// calling functions of its [Config]. One caller at a time.
//
// What comes from the network is believed as far as it can be. A message counts for a
// connection if it names both communication IDs, which are random, and comes from the address
// that the connection is with. Memory is bounded: by what the application has asked for,
// its listeners' backlogs, MaxHalfOpen connections that were accepted and are not ready, and
// MaxLingering that have ended.
package cm
