// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/wire"
)

// farStore is a store that takes a fixed virtual time to give content back. What engines
// wait for in place passes by moving the clock.
type farStore struct {
	mu      sync.Mutex
	pages   map[uint32][]byte
	latency int64
	now     int64
	stall   *int64 // the clock, if engines read by themselves
	waiting []farRead
	reads   int
	fail    bool
}

type farRead struct {
	due  int64
	page []byte
	let  chan struct{}
}

func (f *farStore) Write(slot uint32, page []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pages[slot] = bytes.Clone(page)
	return nil
}

func (f *farStore) Read(slot uint32, page []byte) error {
	f.mu.Lock()
	f.reads++
	if f.stall != nil {
		*f.stall += f.latency
	} else if f.latency > 0 {
		r := farRead{f.now + f.latency, f.pages[slot], make(chan struct{})}
		f.waiting = append(f.waiting, r)
		f.mu.Unlock()
		<-r.let
		f.mu.Lock()
	}
	defer f.mu.Unlock()
	if f.fail {
		return errors.New("the test's store fails")
	}
	copy(page, f.pages[slot])
	return nil
}

func (f *farStore) Free(slot uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.pages, slot)
}

func (f *farStore) Close() error { return nil }

// clock is the time that is the store's: when it gave what was due last, or when it was
// looked whether something is.
func (f *farStore) clock() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stall != nil {
		return *f.stall
	}
	return f.now
}

// let gives the first of what is due, and says whether there was any. Of reads that are
// due together it is that of the least content: which began first is the scheduler's doing.
func (f *farStore) let(now int64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	slices.SortFunc(f.waiting, func(a, b farRead) int {
		return cmp.Or(cmp.Compare(a.due, b.due), bytes.Compare(a.page, b.page))
	})
	if len(f.waiting) == 0 || f.waiting[0].due > now {
		f.now = max(f.now, now)
		return false
	}
	first := f.waiting[0]
	f.now = max(f.now, first.due) // what is read next begins when this has ended
	f.waiting = slices.Delete(f.waiting, 0, 1)
	close(first.let)
	return true
}

// near has the store give all at once from now on.
func (f *farStore) near() {
	f.mu.Lock()
	f.latency, f.stall = 0, nil
	f.mu.Unlock()
	for f.let(Never) {
	}
}

// far is a world whose regions are in such a store. It goes by its own time alone: the
// goroutines of mr that ask the store do so one after the other, and nothing else happens
// meanwhile. So a run is the same on every machine.
type far struct {
	*world
	space *mr.Space
	store *farStore
}

func newFar(t *testing.T, latency int64, policy mr.FaultPolicy) *far {
	t.Helper()
	return newFarOf(t, 32<<12, latency, policy)
}

// newFarOf is newFar with so many bytes of memory at each end.
func newFarOf(t *testing.T, memory int, latency int64, policy mr.FaultPolicy) *far {
	t.Helper()
	store := &farStore{pages: map[uint32][]byte{}, latency: latency}
	space, err := mr.NewSpace(mr.Options{Clock: store.clock})
	if err != nil {
		t.Fatal(err)
	}
	f := &far{space: space, store: store}
	t.Cleanup(func() { // behind the world's own end
		f.store.near()
		if err := space.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := space.UserFault(); err != nil {
		t.Skip(err)
	}
	if err := space.SetStore(f.store); err != nil {
		t.Fatal(err)
	}
	s := usual()
	s.space, s.memory, s.align = space, memory, 1<<21 // what is read ahead ends with a leaf of mr's table
	f.world = newWorld(t, s)
	if policy == mr.FaultStall {
		f.store.stall = &f.world.now
	}
	for i, n := range []*node{f.a, f.b} {
		n.fill(uint64(i))
		if err := n.reg.SetFaultPolicy(policy); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

// evict takes all of a node's memory to the store.
func (f *far) evict(n *node) {
	f.t.Helper()
	f.settle()
	for {
		if _, err := f.space.Evict(n.reg, n.reg.IOVA(), n.reg.Length(), mr.Stored); err != nil {
			if errors.Is(err, mr.ErrNotSupported) {
				f.t.Skip(err)
			}
			f.t.Fatal(err)
		}
		u, err := n.reg.Usage()
		if err != nil {
			f.t.Fatal(err)
		}
		if u.Present == 0 && u.Limbo == 0 {
			return
		}
		runtime.Gosched() // somebody has just brought it back
	}
}

// settle waits until all that is fetched waits for its time to come.
func (f *far) settle() {
	f.t.Helper()
	for end := time.Now().Add(2 * time.Minute); ; runtime.Gosched() {
		f.store.mu.Lock()
		waiting := len(f.store.waiting)
		f.store.mu.Unlock()
		if n := f.space.EvictionStats().Fetching; waiting >= min(n, 4) || f.store.stall != nil { // 4 at a time
			return
		}
		if time.Now().After(end) {
			f.t.Fatal("nobody asks the store")
		}
	}
}

// until runs the world until a node has so many completions.
func (f *far) until(n *node, completions int) {
	f.t.Helper()
	for i := 0; len(n.wcs) < completions; i++ {
		for f.settle(); f.store.let(f.now); {
			f.settle()
		}
		if !f.step(Never-1) && len(n.wcs) < completions {
			f.t.Fatal("nothing happens any more")
		}
		if i > 2_000_000 {
			f.t.Fatal("no end: livelock")
		}
	}
}

// fate decides which packets are lost. It is the same for a packet whatever else is sent:
// what an operation's packets meet does not depend on how the operation before it went, or
// on how often the peer was asked to wait.
type fate struct {
	op   int
	sent map[fateKey]int
	loss float64
}

type fateKey struct {
	from *node
	name string
	psn  wire.PSN
}

// begin starts a further operation.
func (f *fate) begin(op int) {
	f.op = op
	f.sent = map[fateKey]int{}
}

func (f *fate) delivers(p *wire.Packet, from *node) bool {
	k := fateKey{from, p.Info.Name, p.BTH.PSN}
	if p.Info.AETH >= 0 {
		k.name = fmt.Sprint(k.name, p.AETH().Syndrome&0xe0)
	}
	h := fnv.New64a()
	fmt.Fprint(h, f.op, from == from.w.a, k.name, k.psn, f.sent[k])
	f.sent[k]++
	return rand.New(rand.NewPCG(h.Sum64(), 4)).Float64() >= f.loss
}

// majorOps run operations one after the other, with everything evicted before each if
// evict says so, and gives how long each took, sorted. All bytes are checked.
func majorOps(t *testing.T, policy mr.FaultPolicy, evict bool, loss float64, ops int) (took []int64, faults int) {
	f := newFar(t, 200_000, policy)
	a, b := f.a, f.b
	r := rand.New(rand.NewPCG(11, 5))
	lossy := fate{loss: loss}
	f.filter = lossy.delivers
	size := len(a.mem.Bytes())
	model := map[*node][]byte{a: slices.Clone(a.mem.Bytes()), b: slices.Clone(b.mem.Bytes())}
	for i := range ops {
		n := 1 + r.IntN(12_000)
		from, to := r.IntN(size-n), r.IntN(size-n)
		wr := a.remote(SendWR{ID: uint64(i), SGL: a.sgl(from, n), Flags: SendSignaled}, to)
		switch i % 4 {
		case 0, 1:
			wr.Opcode = WRWrite
			copy(model[b][to:], model[a][from:from+n])
		case 2:
			wr.Opcode = WRRead
			copy(model[a][from:], model[b][to:to+n])
		case 3:
			wr.Opcode = WRSend
			b.recv(RecvWR{ID: uint64(i), SGL: b.sgl(to, n)})
			copy(model[b][to:], model[a][from:from+n])
		}
		if evict {
			f.evict(a)
			f.evict(b)
		}
		a.wcs, b.wcs, f.sent = nil, nil, nil
		lossy.begin(i)
		begun := f.now
		a.post(wr)
		f.until(a, 1)
		a.want(WC{ID: uint64(i), Opcode: wrOps[wr.Opcode].wc})
		took = append(took, f.now-begun)
	}
	f.settle()
	faults = f.store.reads
	for _, n := range []*node{a, b} {
		got := make([]byte, size)
		n.env.Mem.Override(mr.FaultStall)
		f.store.near()
		if err := n.env.Mem.Read(n.reg, n.reg.IOVA(), got); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, model[n]) {
			t.Fatal("wrong bytes")
		}
	}
	for _, n := range []*node{a, b} {
		if st := n.env.Stats; st.RetryExceeded.Load()+st.RNRExceeded.Load()+st.SentNakErr.Load() > 0 {
			t.Error("errors")
		}
	}
	slices.Sort(took)
	return took, faults
}

// TestFaultsMeetLoss: SENDs, WRITEs and READs on memory that is in the store, of both ends,
// with 1 % of all packets lost. The classic pitfall of on-demand paging is a timeout that
// is hit during a fault.
//
// A loss costs a probe's wait, 1 ms here, if nothing behind it tells of it. FaultDrop makes a
// loss of each fault. What holds for all is that faults and losses add up and do not breed:
// the tail, the slowest of a hundred, is no longer than that of loss alone and that of
// faults alone together.
func TestFaultsMeetLoss(t *testing.T) {
	ops := 2000 // so that the twenty slowest are no matter of luck
	if raceDetector {
		ops = 40 // what is looked for then are races
	}
	tail := func(took []int64) time.Duration { return time.Duration(took[len(took)*99/100]) }
	took, _ := majorOps(t, mr.FaultHybrid, false, 0.01, ops)
	loss := tail(took)
	for _, policy := range []mr.FaultPolicy{mr.FaultHybrid, mr.FaultStall, mr.FaultRNR, mr.FaultDrop} {
		t.Run(policy.String(), func(t *testing.T) {
			took, _ := majorOps(t, policy, true, 0, ops/8)
			faults := tail(took)
			took, reads := majorOps(t, policy, true, 0.01, ops)
			both := tail(took)
			if both > loss+faults && !raceDetector {
				t.Errorf("the slowest of 100 took %v, with loss alone %v, with faults alone %v", both, loss, faults)
			}
			if reads < len(took) {
				t.Errorf("%d pages came from the store", reads)
			}
			t.Logf("median %v, 99 %% %v, slowest %v; loss alone %v; faults alone %v; %d pages from the store",
				time.Duration(took[len(took)/2]), both, time.Duration(took[len(took)-1]), loss, faults, reads)
		})
	}
}

// TestFaultError: where faults are errors, and where the store has lost what it had, the
// peer's request ends with a remote operational error, and a work request of one's own
// with a QP operation error; the other policies do not fail.
func TestFaultError(t *testing.T) {
	for _, lost := range []bool{false, true} {
		for _, side := range []string{"remote", "local"} {
			for _, op := range []WROpcode{WRWrite, WRRead, WRSend, WRAtomicFetchAdd} {
				t.Run(fmt.Sprintf("lost %v/%s/%d", lost, side, op), func(t *testing.T) {
					policy := mr.FaultError
					if lost {
						policy = mr.FaultRNR
					}
					f := newFar(t, 0, policy)
					a, b := f.a, f.b
					f.store.fail = lost
					n, want := b, WCRemOpErr
					if side == "local" {
						n, want = a, WCLocQPOpErr
					}
					wr := a.remote(SendWR{ID: 1, Opcode: op, SGL: a.sgl(100, 8), CompareAdd: 1}, 8)
					b.recv(RecvWR{ID: 1, SGL: b.sgl(0, 100)})
					f.evict(n)
					a.post(wr)
					f.until(a, 1)
					a.want(WC{ID: 1, Status: want})
					if op == WRSend && side == "remote" {
						b.want(WC{ID: 1, Status: WCLocQPOpErr})
					}
					f.store.mu.Lock()
					f.store.fail = false
					f.store.mu.Unlock()
				})
			}
		}
	}
}

// TestQPFaultPolicy: a QP's own policy counts more than the region's.
func TestQPFaultPolicy(t *testing.T) {
	f := newFar(t, 1_000_000, mr.FaultError)
	f.b.qp.SetFaultPolicy(mr.FaultRNR)
	f.evict(f.b)
	f.a.post(f.a.remote(SendWR{ID: 1, Opcode: WRRead, SGL: f.a.sgl(0, 8), Flags: SendSignaled}, 0))
	f.until(f.a, 1)
	f.a.want(WC{ID: 1, Opcode: WCRDMARead})
	if n := f.b.env.Stats.SentRNRNak.Load(); n == 0 {
		t.Error("the peer was not asked to wait")
	}
	u, err := f.b.reg.Usage()
	if c := f.b.qp.Faults(); c.Major == 0 || c.RNRs == 0 || c.RNRs > u.RNRs {
		t.Errorf("the QP's faults are %+v, the region was the reason for %d RNR NAKs", c, u.RNRs)
	}
	if c := f.a.qp.Faults(); c.RNRs != 0 {
		t.Errorf("who was asked to wait: %+v", c)
	}
	if err != nil || u.RNRs == 0 || f.b.qp.FaultPolicy() != mr.FaultRNR {
		t.Errorf("%+v, %v", u, err)
	}
}
