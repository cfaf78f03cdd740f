// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/tapverbs/tapverbs/internal/stats"
	"github.com/tapverbs/tapverbs/qp"
)

// measure is one end's part in a measurement. Its messages go in rounds: before a
// round the receiver gets its memory ready, and after it every byte is verified,
// while no clock runs.
type measure struct {
	e     *endpoint
	row   rowSpec
	phase phase
	land  *landing // nil when nothing lands at this end
	// peerLand is where the peer's memory for the round begins, peerPattern the
	// peer's pattern, peerFlag the word that follows a WRITE to cold memory.
	peerLand, peerPattern, peerFlag remote

	bad string // what was wrong with a completion; verify adds to it
}

// needsLanding says at which end memory is written to.
func needsLanding(o op, ph phase) (client, server bool) {
	switch o {
	case opRead:
		return true, false
	case opAtomic:
		return true, true
	}
	return ph == phaseLatency, true
}

// newMeasure gets this end's memory.
func newMeasure(e *endpoint, p *plan, row rowSpec, ph phase, s slotting, client bool) (*measure, error) {
	m := &measure{e: e, row: row, phase: ph}
	atClient, atServer := needsLanding(row.Op, ph)
	if client && atClient || !client && atServer {
		if client && row.Op == opAtomic {
			// What atomics return is not what is measured: it lands in resident memory.
			row.Mem = memResident
			s.Stride = 64
		}
		var err error
		if m.land, err = newLanding(e.pd, p, row, s); err != nil {
			return nil, err
		}
	}
	m.resetFlag()
	return m, nil
}

// end gives the memory back and tells what the measurement cost.
func (m *measure) end() (usage, error) {
	st, err := readStatus()
	err = errors.Join(err, m.land.shut())
	use := m.land.cost()
	use.Locked = st.Locked
	return use, err
}

// flagged says whether WRITEs are followed by a word in other memory, which the
// receiver polls: polling cold memory itself would touch it.
func (m *measure) flagged() bool {
	return m.row.Op == opWrite && m.row.Mem.apart() && m.phase == phaseLatency
}

func (m *measure) resetFlag() { atomic.StoreUint64(m.flagWord(), 0) }

func (m *measure) flagWord() *uint64 { return (*uint64)(unsafe.Pointer(&m.e.flag.bytes()[0])) }

// prepare gets this end ready to receive the count messages from first on: pings
// at the server, pongs at the client.
func (m *measure) prepare(first uint64, count int, pong bool) (base int, err error) {
	e := m.e
	e.received, e.onRecv = 0, nil
	if m.land == nil {
		return 0, nil
	}
	if base, err = m.land.take(count); err != nil {
		return 0, err
	}
	m.land.expect(e.pat, first, count, base, pong)
	if m.row.Op == opAtomic && !pong {
		if err := m.land.setWords(e.pat, first, count, base); err != nil {
			return 0, err
		}
	}
	if m.row.Op.twoSided() {
		e.onRecv = m.received
		err = e.postReceives(m.land, first, count, base)
	}
	return base, err
}

// received looks at a receive completion. What is wrong is kept for the verdict.
func (m *measure) received(wc *qp.WC) error {
	n := wc.ID &^ recvBit
	switch {
	case int(wc.ByteLen) != m.row.Size:
		m.bad = fmt.Sprintf("message %d has %d bytes", n, wc.ByteLen)
	case m.row.Op == opWriteImm && (wc.Flags&qp.WCWithImm == 0 || wc.Imm != uint32(n)):
		m.bad = fmt.Sprintf("message %d came with immediate data %d", n, wc.Imm)
	}
	return nil
}

// fill makes message n of the measurement, the i-th of its round, the k-th and
// following of e.wrs, and gives how many work requests it takes. base is the slot
// of the round's first message at this end, for what comes back.
func (m *measure) fill(k int, q *dataQP, n uint64, i, base int, pong bool) int {
	e := m.e
	wr := &e.wrs[k]
	q.sent++
	*wr = qp.SendWR{ID: sendID(q), SGL: e.sges[k][:]}
	off := e.pat.offset(datum(n, pong))
	wr.SGL[0] = qp.SGE{Addr: uint64(e.src.mem.Addr()) + uint64(off), Length: uint32(m.row.Size), LKey: e.src.reg.LKey()}
	switch m.row.Op {
	case opSend:
		wr.Opcode = qp.WRSend
		return 1
	case opRead:
		wr.Opcode = qp.WRRead
		wr.SGL[0] = m.land.sge(base + i)
		wr.RemoteAddr, wr.RKey = m.peerPattern.at(off), m.peerPattern.Key
		return 1
	case opAtomic:
		wr.SGL[0] = m.land.sge(base + i)
		wr.Opcode, wr.CompareAdd = qp.WRAtomicFetchAdd, e.pat.word(datum(n, false))
		if n%2 != 0 {
			wr.Opcode, wr.Swap = qp.WRAtomicCmpSwap, wr.CompareAdd
			wr.CompareAdd = beforeAtomic(m.row, e.pat, n)
		}
	case opWriteImm:
		wr.Opcode, wr.Imm = qp.WRWriteImm, uint32(n)
	case opWrite:
		wr.Opcode = qp.WRWrite
	}
	stride := m.strideAtPeer()
	wr.RemoteAddr, wr.RKey = m.peerLand.at(i*stride), m.peerLand.Key
	if !m.flagged() {
		return 1
	}
	q.sent++
	binary.NativeEndian.PutUint64(e.word[:], n+1)
	e.wrs[k+1] = qp.SendWR{
		ID: sendID(q), Opcode: qp.WRWrite, Flags: qp.SendInline, Inline: e.word[:],
		RemoteAddr: m.peerFlag.Addr, RKey: m.peerFlag.Key,
	}
	return 2
}

func (m *measure) strideAtPeer() int { return slots(m.row, m.phase, 0).Stride }

// send posts message i of a round on its QP, round robin.
func (m *measure) send(first uint64, i, base, depth int, pong bool) (*dataQP, error) {
	e := m.e
	q := e.qps[i%len(e.qps)]
	if err := e.room(q, 2, max(depth, 2)); err != nil {
		return nil, err
	}
	n := m.fill(0, q, first+uint64(i), i, base, pong)
	e.wrs[n-1].Flags |= qp.SendSignaled
	return q, e.post(q, n)
}

// arrival gives the wait for message i of a round to have arrived at this end.
func (m *measure) arrival(first uint64, base int, pong bool) func(i int) error {
	e := m.e
	switch {
	case m.row.Op.twoSided():
		return func(i int) error { return e.waitReceived(i + 1) }
	case m.flagged():
		flag, want := m.flagWord(), uint64(0)
		there := func() bool { return atomic.LoadUint64(flag) == want }
		return func(i int) error {
			want = first + uint64(i) + 1
			return e.waitMemory(there)
		}
	}
	var want byte
	var slot int
	there := func() bool { return m.land.last(slot) == want }
	return func(i int) error {
		msg := e.pat.message(datum(first+uint64(i), pong), m.row.Size)
		slot, want = base+i, msg[len(msg)-1]
		return e.waitMemory(there)
	}
}

// ping plays the client of a latency round and times each message.
func (m *measure) ping(first uint64, count, base, depth int, h *stats.Latency) (time.Duration, error) {
	e := m.e
	parts := int64(1)
	if m.row.Op.halves() {
		parts = 2
	}
	arrived := m.arrival(first, base, true)
	start := time.Now()
	last := time.Duration(0)
	for i := range count {
		q, err := m.send(first, i, base, depth, false)
		if err == nil {
			if m.row.Op.halves() {
				err = arrived(i)
			} else {
				err = e.drain(q)
			}
		}
		if err != nil {
			return 0, err
		}
		now := time.Since(start)
		h.Add(int64(now-last) / parts)
		last = now
	}
	return last, m.drainAll()
}

// pong plays the server of a latency round.
func (m *measure) pong(first uint64, count, base, depth int) error {
	arrived := m.arrival(first, base, false)
	for i := range count {
		if err := arrived(i); err != nil {
			return err
		}
		if _, err := m.send(first, i, 0, depth, true); err != nil {
			return err
		}
	}
	return m.drainAll()
}

// stream plays the client of a bandwidth round: as many messages in flight as
// depth allows on each QP.
func (m *measure) stream(first uint64, count, base, depth int) (time.Duration, error) {
	e := m.e
	batch := min(max(depth/4, 1), maxBatch)
	qps := len(e.qps)
	start := time.Now()
	for i := 0; i < count; i += batch * qps {
		for j, q := range e.qps {
			left := count - i - j // messages from this QP's first of the block on
			if left <= 0 {
				break
			}
			n := min(batch, (left+qps-1)/qps)
			if err := e.room(q, n, depth); err != nil {
				return 0, err
			}
			for k := range n {
				at := i + j + k*qps
				m.fill(k, q, first+uint64(at), at, base, false)
			}
			e.wrs[n-1].Flags |= qp.SendSignaled
			if err := e.post(q, n); err != nil {
				return 0, err
			}
		}
	}
	err := m.drainAll()
	return time.Since(start), err
}

func (m *measure) drainAll() error {
	for _, q := range m.e.qps {
		if err := m.e.drain(q); err != nil {
			return err
		}
	}
	return nil
}

// verify checks what landed at this end in a round; "" means every byte is right.
func (m *measure) verify(first uint64, count, base int, client bool) string {
	bad := m.bad
	m.bad = ""
	switch {
	case bad != "" || m.land == nil:
		return bad
	case m.row.Op == opAtomic && client:
		return m.land.verifyResults(m.row, m.e.pat, first, count, base)
	case m.row.Op == opAtomic:
		return m.land.verifyWords(m.e.pat, first, count, base)
	}
	pong := client && m.row.Op.halves()
	return m.land.verify(m.e.pat, first, count, base, pong)
}

// coldPages is the number of cold pages that count messages are aimed at.
func (m *measure) coldPages(count uint64) uint64 {
	if m.row.Mem != memCold {
		return 0
	}
	n := count * uint64(pages(m.row.Size))
	if m.phase == phaseLatency && m.row.Op.halves() {
		n *= 2
	}
	return n
}
