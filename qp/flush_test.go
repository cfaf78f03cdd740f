// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"unsafe"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

const flushAll = allAccess | mr.FlushGlobal | mr.FlushPersistent

// durable is a world whose nodes allow FLUSH. What b's engine is asked to persist
// waits in tickets until the test says done.
type durable struct {
	*world
	tickets []uint32
	asked   [][2]uint64 // iova, n
}

func newDurable(t *testing.T, s setup) *durable {
	s.access |= mr.FlushGlobal | mr.FlushPersistent
	d := &durable{world: newWorld(t, s)}
	d.b.env.Persist = func(q *QP, r *mr.Region, iova, n uint64, ticket uint32) {
		d.tickets, d.asked = append(d.tickets, ticket), append(d.asked, [2]uint64{iova, n})
	}
	return d
}

// file is a region of b that may be flushed to global visibility.
func (d *durable) file() *mr.Region {
	d.t.Helper()
	m := d.b.mem
	r, err := d.b.env.Keys.Register(mr.RegAttr{PD: 1, Addr: m.Addr(), Length: uint64(len(m.Bytes())), Access: allAccess | mr.FlushGlobal})
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { _ = r.Deregister() })
	return r
}

func (n *node) atomicWrite(id uint64, off, roff int) SendWR {
	return n.remote(SendWR{ID: id, Opcode: WRAtomicWrite, SGL: n.sgl(off, 8), Flags: SendSignaled}, roff)
}

func (n *node) flush(id uint64, key mr.Key, placement, sel uint8, roff, length int) SendWR {
	w := n.remote(SendWR{ID: id, Opcode: WRFlush, Flags: SendSignaled, Flush: FlushWR{placement, sel, uint32(length)}}, roff)
	w.RKey = key
	return w
}

// An ATOMIC WRITE and its answer look as between two of the kernel's soft-RoCE
// (rc-atomic-write-v4.pcap), and so does a FLUSH (host-requester-flush-awrite-v4.pcap).
func TestFlushOnTheWire(t *testing.T) {
	s := usual()
	s.psn = 0x100000
	d := newDurable(t, s)
	var got []string
	d.filter = func(p *wire.Packet, _ *node) bool {
		switch p.Info.Kind {
		case wire.KindAtomicWrite:
			if h := p.RETH(); h.Len != 8 || !bytes.Equal(p.Payload, []byte{0, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11}) || !p.BTH.AckReq {
				t.Errorf("ATOMIC WRITE: %+v, payload % x", h, p.Payload)
			}
		case wire.KindFlush:
			if f, h := p.FETH(), p.RETH(); f != (wire.FETH{Placement: 1}) || h.Len != 5000 || len(p.Payload) != 0 || !p.BTH.AckReq {
				t.Errorf("FLUSH: %+v %+v", f, h)
			}
		case wire.KindReadResp:
			a := p.AETH()
			if a.Syndrome != 0x1f || len(p.Payload) != 0 || p.BTH.PSN.Sub(0x100000)+1 != int32(a.MSN) {
				t.Errorf("answer: %+v at PSN %#x", a, p.BTH.PSN)
			}
		}
		got = append(got, p.Info.Name)
		return true
	}
	key := d.file().RKey()
	binary.LittleEndian.PutUint64(d.a.mem.Bytes(), 0x1122334455667700)
	d.a.post(d.a.atomicWrite(1, 0, 64), d.a.flush(2, key, wire.FlushGlobal, wire.FlushRange, 0, 5000),
		d.a.remote(SendWR{ID: 3, Opcode: WRAtomicFetchAdd, CompareAdd: 1, SGL: d.a.sgl(8, 8), Flags: SendSignaled}, 64))
	d.run()
	d.a.want(WC{ID: 1, Opcode: WCAtomicWrite}, WC{ID: 2, Opcode: WCFlush}, WC{ID: 3, Opcode: WCFetchAdd})
	if v := binary.LittleEndian.Uint64(d.b.mem.Bytes()[64:]); v != 0x1122334455667701 {
		t.Errorf("memory: %#x", v)
	}
	if v := binary.LittleEndian.Uint64(d.a.mem.Bytes()[8:]); v != 0x1122334455667700 {
		t.Errorf("result: %#x", v)
	}
	slices.Sort(got)
	if want := []string{"RC_ATOMIC_ACK", "RC_ATOMIC_WRITE", "RC_FETCH_ADD", "RC_FLUSH", "RC_READ_RESP_ONLY", "RC_READ_RESP_ONLY"}; !slices.Equal(got, want) {
		t.Error(got)
	}
}

// Requests that are lost are sent again; answers that are lost come again, and what
// was executed is not executed twice.
func TestFlushLoss(t *testing.T) {
	for _, lose := range []string{"RC_ATOMIC_WRITE", "RC_FLUSH", "RC_READ_RESP_ONLY"} {
		d := newDurable(t, usual())
		key := d.file().RKey()
		lost, between := 0, false
		d.filter = func(p *wire.Packet, _ *node) bool {
			if p.Info.Name == lose && lost < 2 {
				lost++
				return false
			}
			return true
		}
		word := d.b.mem.Bytes()[64:72]
		binary.NativeEndian.PutUint64(d.a.mem.Bytes(), 5)
		d.a.post(d.a.atomicWrite(1, 0, 64), d.a.flush(2, key, wire.FlushGlobal, wire.FlushMR, 0, 0))
		for d.step(Never - 1) {
			if !between && binary.NativeEndian.Uint64(word) == 5 {
				between = true
				binary.NativeEndian.PutUint64(word, 6) // the application's own
			}
		}
		d.a.want(WC{ID: 1, Opcode: WCAtomicWrite}, WC{ID: 2, Opcode: WCFlush})
		if v := binary.NativeEndian.Uint64(word); v != 6 {
			t.Errorf("%s lost: written a second time: %d", lose, v)
		}
		if lost != 2 || d.a.env.Stats.RetransmittedPkts.Load() == 0 {
			t.Errorf("%s: %d lost, %d sent again", lose, lost, d.a.env.Stats.RetransmittedPkts.Load())
		}
		if lose == "RC_READ_RESP_ONLY" && d.b.env.Stats.AtomicReplayed.Load() == 0 {
			t.Errorf("%s: nothing was answered from what was kept", lose)
		}
	}
}

// A FLUSH to persistence is answered when the memory has been written back, and not
// before; what is posted behind it waits, and its duplicates change nothing.
func TestFlushPersistent(t *testing.T) {
	s := usual()
	s.retry = 1
	d := newDurable(t, s)
	f := persistentRegion(t, d)
	src := d.a.fill(1)
	d.a.post(d.a.remote(SendWR{ID: 1, Opcode: WRWrite, SGL: d.a.sgl(0, 5000), Flags: SendSignaled, RKey: 0}, 0),
		d.a.flush(2, f.RKey(), wire.FlushPersistent|wire.FlushGlobal, wire.FlushRange, 0, 5000),
		d.a.atomicWrite(3, 0, 8192))
	// A slow disk: it costs one of the requester's retries, and RNR NAKs with growing timers.
	for d.now < 2e9 && d.step(2e9) {
	}
	if st := d.a.env.Stats; st.LocalAckTimeout.Load() != 1 || st.RcvdRNRNak.Load() < 8 || st.RcvdRNRNak.Load() > 20 {
		t.Errorf("%d timeouts, %d RNR NAKs", st.LocalAckTimeout.Load(), st.RcvdRNRNak.Load())
	}
	d.a.want(WC{ID: 1, Opcode: WCRDMAWrite})
	if len(d.tickets) != 1 || d.asked[0] != [2]uint64{uint64(d.b.mem.Addr()), 5000} {
		t.Fatal(d.tickets, d.asked)
	}
	if !bytes.Equal(d.b.mem.Bytes()[:5000], src[:5000]) {
		t.Error("flushed before the WRITE was in place")
	}
	if !bytes.Equal(d.b.mem.Bytes()[8192:8200], make([]byte, 8)) {
		t.Error("the ATOMIC WRITE has passed the FLUSH")
	}
	d.b.qp.Persisted(d.tickets[0]+1, errors.New("another's"))
	d.b.qp.Persisted(d.tickets[0], nil)
	d.b.qp.Persisted(d.tickets[0], errors.New("a second time"))
	d.run()
	d.a.want(WC{ID: 1, Opcode: WCRDMAWrite}, WC{ID: 2, Opcode: WCFlush}, WC{ID: 3, Opcode: WCAtomicWrite})
	if len(d.tickets) != 1 || !bytes.Equal(d.b.mem.Bytes()[8192:8200], src[:8]) {
		t.Errorf("persisted %d times, then % x", len(d.tickets), d.b.mem.Bytes()[8192:8200])
	}
	// A disk that fails.
	d.a.wcs = nil
	d.a.post(d.a.flush(4, f.RKey(), wire.FlushPersistent, wire.FlushMR, 0, 0))
	for len(d.tickets) < 2 && d.step(Never-1) {
	}
	if want := [2]uint64{f.IOVA(), f.Length()}; d.asked[1] != want {
		t.Errorf("asked for %x, want the region %x", d.asked[1], want)
	}
	d.b.qp.Persisted(d.tickets[1], errors.New("I/O error"))
	d.run()
	d.a.want(WC{ID: 4, Status: WCRemAccessErr})
	if !slices.Contains(d.b.events, EventQPAccessErr) {
		t.Error(d.b.events)
	}
}

// What is posted behind a FLUSH needs no RNR NAK: who has posted receives need not allow
// for one.
func TestFlushWithoutRNR(t *testing.T) {
	s := usual()
	s.rnrRetry = 0
	d := newDurable(t, s)
	f := persistentRegion(t, d)
	d.b.recv(RecvWR{ID: 9, SGL: d.b.sgl(0, 3000)})
	d.a.post(d.a.flush(1, f.RKey(), wire.FlushPersistent, wire.FlushMR, 0, 0),
		SendWR{ID: 2, Opcode: WRSend, SGL: d.a.sgl(0, 3000), Flags: SendSignaled}, d.a.atomicWrite(3, 0, 0))
	for d.now < 1e6 && d.step(1e6) {
	}
	if len(d.a.wcs) != 0 || len(d.b.wcs) != 0 || len(d.tickets) != 1 {
		t.Fatal("the FLUSH did not hold up what is behind it")
	}
	d.b.qp.Persisted(d.tickets[0], nil)
	d.run()
	d.a.want(WC{ID: 1, Opcode: WCFlush}, WC{ID: 2, Opcode: WCSend}, WC{ID: 3, Opcode: WCAtomicWrite})
	if len(d.b.wcs) != 1 || d.b.env.Stats.SentRNRNak.Load() != 0 {
		t.Errorf("%d messages received, %d RNR NAKs", len(d.b.wcs), d.b.env.Stats.SentRNRNak.Load())
	}
}

// A FLUSH whose place in the outbox is lost, since a READ before it met memory that is
// busy, is answered when it is done all the same, and not when it is asked for again.
func TestFlushBehindBusyRead(t *testing.T) {
	for _, fail := range []error{nil, errors.New("I/O error")} {
		for _, early := range []bool{true, false} { // done before it is asked for again, or not
			d := newDurable(t, usual())
			f := persistentRegion(t, d)
			persist := d.b.env.Persist
			d.b.env.Persist = func(q *QP, r *mr.Region, iova, n uint64, ticket uint32) {
				persist(q, r, iova, n, ticket)
				o := &q.resp.out
				o.readError(&q.resp, o.at(0), mr.ErrBusy)
			}
			d.a.post(d.a.remote(SendWR{ID: 1, Opcode: WRRead, SGL: d.a.sgl(0, 5000), Flags: SendSignaled}, 0),
				d.a.flush(2, f.RKey(), wire.FlushPersistent, wire.FlushMR, 0, 0))
			until := func(done func() bool) {
				for !done() && d.now < 1e9 && d.step(1e9) {
				}
			}
			until(func() bool { return len(d.tickets) > 0 })
			if !early {
				until(func() bool { return len(d.a.wcs) == 2 })
				d.a.want(WC{ID: 1, Opcode: WCRDMARead})
			}
			d.b.qp.Persisted(d.tickets[0], fail)
			d.run()
			switch {
			case fail == nil:
				d.a.want(WC{ID: 1, Opcode: WCRDMARead}, WC{ID: 2, Opcode: WCFlush})
			case len(d.a.wcs) != 2 || d.a.wcs[1].Status == WCSuccess:
				t.Errorf("early %v: a FLUSH that failed: %+v", early, d.a.wcs)
			}
			if len(d.tickets) != 1 {
				t.Errorf("persisted %d times", len(d.tickets))
			}
		}
	}
}

// A QP that is reset while a FLUSH is at the disk hears nothing of it any more.
func TestFlushReset(t *testing.T) {
	d := newDurable(t, usual())
	f := persistentRegion(t, d)
	d.a.post(d.a.flush(1, f.RKey(), wire.FlushPersistent, wire.FlushMR, 0, 0))
	for len(d.tickets) < 1 && d.step(Never-1) {
	}
	d.b.modify(Attr{State: StateReset}, AttrState)
	d.b.qp.Persisted(d.tickets[0], nil)
	if d.b.qp.resp.out.n != 0 || d.b.qp.resp.persisting {
		t.Error("the reset QP owes something")
	}
}

// What is not allowed, or makes no sense, is refused.
func TestFlushErrors(t *testing.T) {
	d := newDurable(t, usual())
	a := d.a
	for _, c := range []struct {
		wr   SendWR
		want error
	}{
		{SendWR{Opcode: WRFlush}, ErrFlush},
		{SendWR{Opcode: WRFlush, Flush: FlushWR{Placement: 4}}, ErrFlush},
		{SendWR{Opcode: WRFlush, Flush: FlushWR{Placement: 1, Selectivity: 2}}, ErrFlush},
		{SendWR{Opcode: WRFlush, Flush: FlushWR{Placement: 1, Length: 1<<31 + 1}}, ErrLength},
		{SendWR{Opcode: WRFlush, Flush: FlushWR{Placement: 1}, SGL: a.sgl(0, 8)}, ErrTooManySGE},
		{SendWR{Opcode: WRFlush, Flush: FlushWR{Placement: 1}, Flags: SendInline}, ErrTooManySGE},
		{SendWR{Opcode: WRAtomicWrite, SGL: a.sgl(0, 4)}, ErrLength},
		{SendWR{Opcode: WRAtomicWrite, SGL: a.sgl(0, 16)}, ErrLength},
		{SendWR{Opcode: WRAtomicWrite, Inline: make([]byte, 7), Flags: SendInline}, ErrLength},
	} {
		if n, err := a.qp.PostSend([]SendWR{c.wr}); n != 0 || !errors.Is(err, c.want) {
			t.Errorf("%+v: %d, %v, want %v", c.wr, n, err, c.want)
		}
	}
	for _, c := range []struct {
		name   string
		access mr.Access // of the QP
		wr     func(d *durable) SendWR
		want   WCStatus
	}{
		{"misaligned", flushAll, func(d *durable) SendWR { return d.a.atomicWrite(1, 0, 4) }, WCRemInvReqErr},
		{"QP without WRITE", flushAll &^ mr.RemoteWrite, func(d *durable) SendWR { return d.a.atomicWrite(1, 0, 0) }, WCRemInvReqErr},
		{"beyond the region", flushAll, func(d *durable) SendWR { return d.a.atomicWrite(1, 0, 1<<20) }, WCRemAccessErr},
		{"QP without FLUSH", allAccess, func(d *durable) SendWR { return d.a.flush(1, d.file().RKey(), wire.FlushGlobal, 0, 0, 1) }, WCRemInvReqErr},
		{"region without FLUSH", flushAll, func(d *durable) SendWR { return d.a.flush(1, d.b.reg.RKey(), wire.FlushGlobal, 0, 0, 1) }, WCRemAccessErr},
		{"region without persistence", flushAll, func(d *durable) SendWR { return d.a.flush(1, d.file().RKey(), wire.FlushPersistent, 0, 0, 1) }, WCRemAccessErr},
		{"range beyond the region", flushAll, func(d *durable) SendWR { return d.a.flush(1, d.file().RKey(), wire.FlushGlobal, 0, 1, 1<<20) }, WCRemAccessErr},
		{"whole region, wherever", flushAll, func(d *durable) SendWR { return d.a.flush(1, d.file().RKey(), wire.FlushGlobal, 1, -5, 0) }, WCSuccess},
		{"no bytes, wrong key", flushAll, func(d *durable) SendWR { return d.a.flush(1, 1, wire.FlushGlobal, 0, 0, 0) }, WCRemAccessErr},
		{"whole region, wrong key", flushAll, func(d *durable) SendWR { return d.a.flush(1, 1, wire.FlushGlobal, 1, 0, 0) }, WCRemAccessErr},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newDurable(t, usual())
			d.b.qp.attr.Access = c.access
			wr := c.wr(d)
			d.a.post(wr)
			d.run()
			d.a.want(WC{ID: 1, Status: c.want, Opcode: wrOps[wr.Opcode].wc})
		})
	}
}

// XRC has both, too: keys are those of the domain of the SRQ that is named.
func TestFlushXRC(t *testing.T) {
	w, _ := newXRC(t, func(s *setup) { s.access |= mr.FlushGlobal })
	d := &durable{world: w}
	key := d.file().RKey()
	wr := []SendWR{w.a.atomicWrite(1, 0, 64), w.a.flush(2, key, wire.FlushGlobal, wire.FlushMR, 0, 0), w.a.flush(3, key, wire.FlushGlobal, wire.FlushMR, 0, 0)}
	wr[0].RemoteSRQN, wr[1].RemoteSRQN, wr[2].RemoteSRQN = 3, 3, 4
	binary.NativeEndian.PutUint64(w.a.mem.Bytes(), 77)
	w.a.post(wr...)
	w.run()
	w.a.want(WC{ID: 1, Opcode: WCAtomicWrite}, WC{ID: 2, Opcode: WCFlush}, WC{ID: 3, Status: WCRemAccessErr})
	if v := binary.NativeEndian.Uint64(w.b.mem.Bytes()[64:]); v != 77 {
		t.Error(v)
	}
	for _, name := range []string{"XRC_ATOMIC_WRITE", "XRC_FLUSH", "XRC_READ_RESP_ONLY"} {
		if !slices.Contains(w.sent, name) {
			t.Errorf("no %s: %v", name, w.sent)
		}
	}
}

// FLUSH and ATOMIC WRITE count as outstanding: no more than max_rd_atomic are out.
func TestFlushDepth(t *testing.T) {
	s := usual()
	s.rdAtomic = 2
	d := newDurable(t, s)
	key := d.file().RKey()
	out, most := 0, 0
	d.filter = func(p *wire.Packet, _ *node) bool {
		switch p.Info.Kind {
		case wire.KindFlush, wire.KindAtomicWrite:
			out++
			most = max(most, out)
		case wire.KindReadResp:
			out--
		}
		return true
	}
	for i := range 20 {
		d.a.post(d.a.atomicWrite(uint64(2*i), 0, 64), d.a.flush(uint64(2*i+1), key, wire.FlushGlobal, 0, 0, 64))
	}
	d.run()
	if len(d.a.wcs) != 40 || most != 2 {
		t.Errorf("%d completions, %d outstanding at most", len(d.a.wcs), most)
	}
	for _, wc := range d.a.wcs {
		if wc.Status != WCSuccess {
			t.Fatalf("%+v", wc)
		}
	}
}

// persistentRegion is a region of b over a file: only those may be flushed to
// persistence. Its iova is that of b's memory, into which the WRITEs go.
func persistentRegion(t *testing.T, d *durable) *mr.Region {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(1 << 16); err != nil {
		t.Fatal(err)
	}
	b, err := syscall.Mmap(int(f.Fd()), 0, 1<<16, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	r, err := d.b.env.Keys.Register(mr.RegAttr{PD: 1, Addr: uintptr(unsafe.Pointer(&b[0])), Length: 1 << 16,
		IOVA: uint64(d.b.mem.Addr()), HaveIOVA: true, Access: flushAll})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(r.Deregister(), syscall.Munmap(b)); err != nil {
			t.Error(err)
		}
	})
	return r
}
