// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
)

// What the owner and the peer of pair.go measure for the comparison: many queue pairs,
// and loss.

const (
	// pairPort is the TCP port of the owner.
	pairPort  = 18601
	manyTime  = 500 * time.Millisecond
	manySize  = 64 // bytes of a message
	manyDepth = 16 // work requests that a queue of a queue pair holds, and how many are in flight, on one or on all
	bulkLoss  = 0.01
)

// manyQPs are the numbers of queue pairs.
var manyQPs = []int{1, 100, 10000}

// manyResult is what the peer prints.
type manyResult struct {
	QPs  []manyRow
	Bulk [3]float64 // Gbit/s: nothing lost, packets, frames
}

type manyRow struct {
	QPs  int
	RSS  [2]int64 // bytes that the queue pairs took, of the owner and of the peer
	Rate float64
	CPU  float64 // ns a message, both ends
}

// pairParts runs the two ends and enters what the peer found.
func pairParts(part string) func(r *room, b *book) error {
	return func(r *room, b *book) error {
		end := func(role string, i int) command {
			return command{at: r.here, args: []string{r.self, "end", role, r.ports[i].Name, r.ports[i].V4.String(), part}}
		}
		o, err := pair(end("owner", 0), end("peer", 1), pairPort)
		if err != nil {
			return err
		}
		var m manyResult
		if err := json.Unmarshal([]byte(o.client), &m); err != nil {
			return fmt.Errorf("the peer printed %q: %w", o.client, err)
		}
		for _, row := range m.QPs {
			if row.QPs >= 100 { // the process grows by more than one alone takes
				b.add("queue pairs", "owner", row.QPs, memory, float64(row.RSS[0])/float64(row.QPs))
				b.add("queue pairs", "peer", row.QPs, memory, float64(row.RSS[1])/float64(row.QPs))
			}
			b.add("queue pairs", "write", row.QPs, rate, row.Rate)
			b.add("queue pairs", "write", row.QPs, cpuMsg, row.CPU)
		}
		if part == "loss" {
			for i, what := range []string{"none", "packets", "frames"} {
				b.add("loss", what, recoverySize, gbps, m.Bulk[i])
			}
		}
		return nil
	}
}

// pairEnd is "end owner PORT ADDR PART" and "end peer PORT ADDR PART".
func pairEnd(role, port, addr, part string) error {
	prefix, err := netip.ParsePrefix(addr)
	if err != nil {
		return err
	}
	m, err := openMachine(port, []netip.Prefix{prefix})
	if err != nil {
		return err
	}
	defer m.dev.Close()
	at := fmt.Sprintf("127.0.0.1:%d", pairPort)
	if role == "owner" {
		l, err := net.Listen("tcp", at)
		if err != nil {
			return err
		}
		return (&owner{machine: m}).serve(l)
	}
	p, err := newPeer(m, at)
	if err != nil {
		return err
	}
	defer p.conn.Close()
	var out manyResult
	if part == "loss" {
		out.Bulk, err = p.bulk()
	} else {
		for _, n := range manyQPs {
			var row manyRow
			if row, err = p.manyRow(n); err != nil {
				break
			}
			out.QPs = append(out.QPs, row)
		}
	}
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(out)
}

// bulk writes messages of 1 MiB without loss, with some packets lost, and with as many frames.
func (p *peer) bulk() (out [3]float64, err error) {
	if err := p.region(order{Bytes: recoveryRegion}); err != nil {
		return out, err
	}
	if _, err := p.tell(order{Do: "state", State: stateResident, N: recoveryRegion}); err != nil {
		return out, err
	}
	for i, c := range [len(out)]struct{ frames, packets float64 }{{0, 0}, {0, bulkLoss}, {bulkLoss, 0}} {
		if out[i], err = p.recovery(qp.WRWrite, c.frames, c.packets); err != nil {
			return out, fmt.Errorf("WRITEs of 1 MiB with %g of the frames and %g of the packets lost: %w", c.frames, c.packets, err)
		}
	}
	return out, nil
}

// manyRow measures with n queue pairs at each end.
func (p *peer) manyRow(n int) (r manyRow, err error) {
	before, err := resident()
	if err != nil {
		return r, err
	}
	ends, err := p.makeMany(n)
	if err != nil {
		return r, err
	}
	a, err := p.tell(order{Do: "many", Ends: ends})
	if err != nil {
		return r, err
	}
	if err := p.bringMany(a.Ends); err != nil {
		return r, err
	}
	after, err := resident()
	if err != nil {
		return r, err
	}
	r = manyRow{QPs: n, RSS: [2]int64{a.RSS, after - before}}
	if err := p.region(order{Bytes: 1 << 20}); err != nil {
		return r, err
	}
	// Each queue pair has sent once before the clock runs.
	if _, err := p.spread(max(n, 1000), time.Time{}); err != nil {
		return r, err
	}
	both := func() (time.Duration, error) {
		mine, err := processorTime()
		if err != nil {
			return 0, err
		}
		a, err := p.tell(order{Do: "cpu"})
		return mine + a.CPU, err
	}
	cpu, err := both()
	if err != nil {
		return r, err
	}
	start := time.Now()
	sent, err := p.spread(0, start.Add(manyTime))
	if err != nil {
		return r, err
	}
	took := time.Since(start)
	end, err := both()
	if err == nil {
		err = p.endMany()
	}
	r.Rate, r.CPU = float64(sent)/took.Seconds(), float64(end-cpu)/float64(sent)
	return r, err
}

// spread posts WRITEs on the queue pairs in turn, up to most or until the time has come, and
// gives how many. manyDepth are in flight, however many queue pairs there are.
func (p *peer) spread(most int, until time.Time) (sent int, err error) {
	sgl := [1]qp.SGE{{Addr: uint64(p.mem.Addr()), Length: manySize, LKey: p.reg.LKey()}}
	wr := [1]qp.SendWR{{Opcode: qp.WRWrite, Flags: qp.SendSignaled, SGL: sgl[:], RemoteAddr: p.remote.Addr, RKey: p.remote.Key}}
	for flying, over := 0, false; !over || flying > 0; {
		for !over && flying < manyDepth {
			if _, err := p.many[sent%len(p.many)].PostSend(wr[:]); err != nil {
				return sent, err
			}
			flying++
			sent++
			over = most > 0 && sent == most || most == 0 && sent%64 == 0 && !time.Now().Before(until)
		}
		n, err := p.take()
		if err != nil {
			return sent, err
		}
		flying -= n
	}
	return sent, nil
}

// endMany ends the queue pairs that there were.
func (m *machine) endMany() error {
	for _, q := range m.many {
		if err := q.Destroy(); err != nil {
			return err
		}
	}
	m.many = nil
	return nil
}

// makeMany makes n queue pairs.
func (m *machine) makeMany(n int) (ends []end, err error) {
	e, err := m.end()
	if err != nil {
		return nil, err
	}
	m.many, ends = make([]*provider.QP, n), make([]end, n)
	for i := range n {
		q, err := m.pd.CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: m.cq, RecvCQ: m.cq,
			Caps: qp.Caps{SendWR: manyDepth, RecvWR: manyDepth, SendSGE: 1, RecvSGE: 1}})
		if err != nil {
			return nil, err
		}
		e.QPN = q.Num()
		m.many[i], ends[i] = q, e
	}
	return ends, nil
}

// bringMany connects them.
func (m *machine) bringMany(to []end) error {
	if len(to) != len(m.many) {
		return errors.New("not as many queue pairs at the other end")
	}
	for i, q := range m.many {
		if err := m.bring(q, to[i], ackTimeout); err != nil {
			return err
		}
	}
	return nil
}

// resident is the memory of this process in bytes, without what Go could give back.
func resident() (int64, error) {
	debug.FreeOSMemory()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(b), "VmRSS:")
	var kib int64
	_, err = fmt.Sscan(rest, &kib)
	return kib << 10, err
}

// processorTime is the user and system time of this process so far.
func processorTime() (time.Duration, error) {
	var u unix.Rusage
	err := unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), err
}
