// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
	"github.com/tapverbs/tapverbs/wire"
)

// twinRun is what both processes of a run must know.
type twinRun struct {
	Seed                        int64
	Loss, Dup, Reorder, Corrupt float64
	Ops, Max                    int
	Timeout                     uint8 // of the QPs
	Resident                    bool
	Limit                       time.Duration
}

// twinRecvs is more than a side receives: the engine works on while the application
// has no processor, and must not be short of receives that this would have posted.
const twinRecvs = 256

const (
	runEnv  = "TAPVERBS_ENGINES_RUN"  // a twinRun as JSON
	portEnv = "TAPVERBS_ENGINES_PORT" // a fabric.Port as JSON
)

// Two processes, each with a TAP and an engine, with the faults in front of the
// TAPs and in real time.
func TestTwoProcesses(t *testing.T) {
	for _, r := range []twinRun{
		// A timer of a second does not run out only because the machine is busy.
		{Seed: 1, Ops: 150, Max: 200 << 10, Timeout: 18},
		{Seed: 2, Loss: 0.01, Dup: 0.01, Reorder: 0.01, Corrupt: 0.01, Ops: 100, Max: 100 << 10, Timeout: 16, Resident: true},
		{Seed: 3, Loss: 0.05, Dup: 0.05, Reorder: 0.05, Corrupt: 0.01, Ops: 60, Max: 50 << 10, Timeout: 16},
		{Seed: 4, Loss: 0.2, Dup: 0.2, Reorder: 0.2, Ops: 15, Max: 8 << 10, Timeout: 15},
	} {
		t.Run(fmt.Sprintf("%d-loss%g%%", r.Seed, 100*r.Loss), func(t *testing.T) {
			r.Limit = hang
			b, err := json.Marshal(r)
			if err != nil {
				t.Fatal(err)
			}
			runScenario(t, 2*r.Limit, fabric.Start, "twin", runEnv+"="+string(b))
		})
	}
}

func twin() error { return twins("twin-peer", twinSide) }

// twins is the first of two processes: it makes the fabric, starts the other, which runs
// another scenario, and is side 0.
func twins(peer string, side func(i int, port fabric.Port, in io.Reader, out io.Writer) error) (err error) {
	f, err := fabric.New(fabric.Config{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	var ports [2]fabric.Port
	for i := range ports {
		if ports[i], err = f.AddPort(i); err != nil {
			return err
		}
	}
	b, err := json.Marshal(ports[1])
	if err != nil {
		return err
	}
	runtime.LockOSThread() // the other dies with this thread
	defer runtime.UnlockOSThread()
	cmd := scenario(context.Background(), peer, portEnv+"="+string(b))
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	if err = side(0, ports[0], out, in); err != nil {
		_ = cmd.Process.Kill() // it would wait for us
	}
	in.Close()
	return errors.Join(err, cmd.Wait())
}

func twinPeer() error { return peerOf(twinSide) }

// peerOf is the second of two processes, side 1.
func peerOf(side func(i int, port fabric.Port, in io.Reader, out io.Writer) error) error {
	var p fabric.Port
	if err := json.Unmarshal([]byte(os.Getenv(portEnv)), &p); err != nil {
		return err
	}
	return side(1, p, os.Stdin, os.Stdout)
}

// hello is what the sides tell each other before they start, and summary at the end.
type hello struct {
	GID  []byte
	QPN  []wire.QPN
	Keys []keys
}

type summary struct {
	Link                                                                 taptest.Counts
	Retransmitted, Probes, Duplicates, OutOfSeq, BadICRC, Timeouts, Sent uint64
	RNR                                                                  uint64 // NAKs sent
	TxErrors, TxDropped, Dropped                                         uint64 // of the device
	Tap                                                                  tap.Stats
}

// dialogue sends what we say and takes what the peer says.
func dialogue[T any](enc *json.Encoder, dec *json.Decoder, say T) (heard T, err error) {
	if err = enc.Encode(say); err == nil {
		err = dec.Decode(&heard)
	}
	if err != nil {
		err = fmt.Errorf("talk to the peer: %w", err)
	}
	return heard, err
}

func twinSide(i int, port fabric.Port, in io.Reader, out io.Writer) (err error) {
	var r twinRun
	if err := json.Unmarshal([]byte(os.Getenv(runEnv)), &r); err != nil {
		return err
	}
	enc, dec := json.NewEncoder(out), json.NewDecoder(in)
	raw, err := tap.Open(tap.Config{Name: port.Name, Without: tap.USO4 | tap.USO6, Plain: r.Seed%2 == 0})
	if err != nil {
		return err
	}
	lossy := taptest.NewLossy(raw, taptest.Config{Seed: 2*r.Seed + int64(i), ReorderDelay: 300 * time.Microsecond})
	d, err := provider.Open(provider.Config{Device: lossy, Addrs: []netip.Prefix{port.V4, port.V6}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	pd, err := d.AllocPD()
	if err != nil {
		return err
	}
	mtus := []qp.MTU{qp.MTU256, qp.MTU1024, qp.MTU4096}
	say := hello{}
	gid, err := d.QueryGID(harness.GIDv4)
	if err != nil {
		return err
	}
	say.GID = gid[:]
	var sides []*side
	for k, mtu := range mtus {
		pl := newPlan(mix{seed: uint64(r.Seed)*100 + uint64(k), ops: r.Ops, max: r.Max, mtu: mtu, resident: r.Resident})
		s, err := twinQP(d, pd, &pl.half[i], r.Resident)
		if err != nil {
			return err
		}
		sides = append(sides, s)
		say.QPN, say.Keys = append(say.QPN, s.qp.Num()), append(say.Keys, s.own)
	}
	heard, err := dialogue(enc, dec, say)
	if err != nil {
		return err
	}
	for k, s := range sides {
		s.peer = heard.Keys[k]
		a := provider.QPAttr{
			Attr: qp.Attr{PathMTU: mtus[k], RQPSN: wire.PSN(0xfffff0 + 1 - i), SQPSN: wire.PSN(0xfffff0 + i), DestQPN: heard.QPN[k],
				Access: allRights, Port: 1, MaxRdAtomic: 16, MaxDestRdAtomic: 16, MinRNRTimer: 12, Timeout: r.Timeout, RetryCnt: 7, RNRRetry: 7},
			AH: provider.AHAttr{DGID: [16]byte(heard.GID), SGIDIndex: harness.GIDv4, PortNum: 1},
		}
		if err := harness.Up(s.qp, a, qp.StateRTS); err != nil {
			return err
		}
		if err := s.offer(); err != nil { // before the peer begins
			return err
		}
	}
	if _, err := dialogue(enc, dec, "connected"); err != nil {
		return err
	}
	lossy.SetFaults(r.Loss, r.Dup, r.Reorder, r.Corrupt)
	for end := time.Now().Add(r.Limit); ; {
		done := true
		for k, s := range sides {
			if err := s.pump(); err != nil {
				return fmt.Errorf("connection %d, %d of %d sent: %w", k, s.retired, len(s.sends), err)
			}
			done = done && s.done()
		}
		if done {
			break
		}
		if time.Now().After(end) {
			return fmt.Errorf("not done after %v: %s", r.Limit, progressOf(sides))
		}
		runtime.Gosched()
	}
	if _, err := dialogue(enc, dec, "done"); err != nil {
		return err
	}
	for k, s := range sides {
		if n := s.cq.Poll(s.wcs); n > 0 {
			return fmt.Errorf("connection %d: completed a second time: %+v", k, s.wcs[:n])
		}
		if err := s.check(); err != nil {
			return fmt.Errorf("connection %d: %w", k, err)
		}
	}
	p, st := d.Protocol(), d.Stats()
	sum := summary{Link: lossy.Counts(), Retransmitted: p.RetransmittedPkts.Load(), Probes: p.Probes.Load(), Duplicates: p.DuplicateRequest.Load(), Sent: p.SentPkts.Load(),
		OutOfSeq: p.OutOfSeqRequest.Load() + p.OutOfSeqResponse.Load(), BadICRC: st.Drops[provider.DropICRC], Timeouts: p.LocalAckTimeout.Load(),
		RNR: p.SentRNRNak.Load(), TxErrors: st.TxErrors + st.DeviceErrors, TxDropped: st.TxDropped, Dropped: st.Dropped(), Tap: st.Tap}
	other, err := dialogue(enc, dec, sum)
	if err != nil {
		return err
	}
	if i == 0 {
		fmt.Fprintf(os.Stderr, "side 0: %+v\nside 1: %+v\n", sum, other)
	}
	return sum.check(r, other)
}

func twinQP(d *provider.Device, pd *provider.PD, h *half, resident bool) (*side, error) {
	cq, err := d.CreateCQ(1024, nil)
	if err != nil {
		return nil, err
	}
	q, err := pd.CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: cq, RecvCQ: cq,
		Caps: qp.Caps{SendWR: 64, RecvWR: twinRecvs, SendSGE: maxSGE, RecvSGE: maxSGE, Inline: maxInline}})
	if err != nil {
		return nil, err
	}
	_, size := h.layout()
	mem, err := mr.Alloc(size)
	if err != nil {
		return nil, err
	}
	// The process ends soon: memory and registrations go with it.
	s, _, err := newSide(h, resident, pd, q, cq, mem.Bytes(), mem.Addr())
	if err == nil {
		s.recvs = twinRecvs
	}
	return s, err
}

func progressOf(ss []*side) (out string) {
	for _, s := range ss {
		out += strconv.Itoa(s.retired) + "/" + strconv.Itoa(len(s.sends)) + " sent, " +
			strconv.Itoa(s.taken) + "/" + strconv.Itoa(len(s.half.recvs)) + " received, " + s.qp.State().String() + "; "
	}
	return out
}

// check: faults happened if they were asked for, and only then.
func (s summary) check(r twinRun, other summary) error {
	for _, f := range []struct {
		name string
		p    float64
		n    uint64
	}{{"lost", r.Loss, s.Link.Lost}, {"duplicated", r.Dup, s.Link.Duplicated}, {"reordered", r.Reorder, s.Link.Reordered}, {"corrupted", r.Corrupt, s.Link.Corrupted}} {
		if (f.p > 0) != (f.n > 0) || float64(f.n) < 0.4*f.p*float64(s.Link.Sent) {
			return fmt.Errorf("%d of %d frames were %s, want about %g", f.n, s.Link.Sent, f.name, f.p*float64(s.Link.Sent))
		}
	}
	total := s.Retransmitted + other.Retransmitted
	switch {
	case r.Loss > 0 && total == 0:
		return errors.New("nothing was retransmitted")
	case r.Corrupt > 0 && s.BadICRC+other.BadICRC == 0:
		return errors.New("no corrupted packet was found by its ICRC")
	// A peer that has no processor for 20 ms is probed, and what it says late may be taken for the
	// answer: then packets are sent again. Without a probe none are; TestNoFaults says the rest.
	case r.Loss == 0 && (s.Retransmitted > 0 && s.Probes == 0 || s.Duplicates > other.Retransmitted):
		return fmt.Errorf("without faults: %+v, other side: %+v", s, other)
	case r.Loss == 0 && s.OutOfSeq+s.Timeouts+s.BadICRC+s.RNR+s.TxErrors+s.TxDropped+s.Dropped > 0:
		return fmt.Errorf("without faults: %+v", s)
	}
	return nil
}
