// SPDX-License-Identifier: Apache-2.0

// Package provider is the device: it joins a TAP port (package tap), the
// protocol (package qp) and memory (package mr) to something that answers to
// verbs, and holds the verbs API for Go programs.
//
//	dev, err := provider.Open(provider.Config{Port: "tv0", Addrs: addrs})
//	pd, err := dev.AllocPD()
//	cq, err := dev.CreateCQ(256, nil)
//	mem, err := mr.Alloc(1 << 20)
//	region, err := pd.RegMR(mem.Bytes(), mr.LocalWrite|mr.RemoteWrite)
//	q, err := pd.CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: cq, RecvCQ: cq, …})
//	err = q.Modify(…) // RESET, INIT, RTR, RTS
//	_, err = q.PostSend(wrs)
//	n := cq.Poll(wcs)
//
// # Who does the work
//
// All state of the queue pairs, the neighbour table and the egress belongs to a
// shard and is touched only by the one who holds that shard's baton, a lock that
// those who have work try to take: a goroutine that posts sends its packets
// itself, one that polls an empty CQ reads the TAP itself, and nothing is handed
// from thread to thread on that path. A background goroutine, asleep in poll(2)
// on the TAP and an eventfd, does what nobody else is there to do. While somebody
// polls it stays away. See shard.go and background.go.
//
// Order of locks: Device.mu, then the baton, then the small ones of queues
// (events, completion channels), which are held for a few instructions only.
//
// # Errors
//
// What fails returns an error that wraps one of this package's sentinels or one
// of packages qp, mr and tap; Errno gives the number that the C library's verbs
// would have returned.
package provider
