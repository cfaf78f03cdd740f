// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"sync"
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

// Several queues of a TAP, with an engine (a shard) each: two threads of one process, each with a
// queue pair and a completion queue of its own, WRITE to another process, which sleeps: so its
// packets are its background goroutines' work.

const (
	shardThreads = 2
	shardDepth   = 32
	shardTime    = 700 * time.Millisecond
)

// shardQueues are the numbers of queues that are compared.
var shardQueues = []int{1, 2}

// shardEnds are one process's ends, and the owner's memory.
type shardEnds struct {
	Ends []end
	Addr uint64
	Key  mr.Key
}

// sharded is a process with several queue pairs on a device of several queues.
type sharded struct {
	machine
	cqs []*provider.CQ
	qps []*provider.QP
	mem *mr.Memory
	reg *provider.MR
}

// shardsPart has one queue and two take turns.
func shardsPart(r *room, b *book) error {
	for _, n := range shardQueues {
		o, err := pair(r.shardEnd("shard-owner", 0, n, "rate"), r.shardEnd("shard-peer", 1, n, "rate"), pairPort)
		var v float64
		if err == nil {
			if err = json.Unmarshal([]byte(o.client), &v); err == nil {
				b.add("shards", "write", n, rate, v)
			}
		}
		b.try("shards", key{Who: "shards", What: "write", X: n}, err)
	}
	simulatePart(b)
	return nil
}

// shardEnd is the command of one end with n queues.
func (r *room) shardEnd(role string, i, n int, what string) command {
	p := r.queued[i]
	return command{at: r.here, args: []string{r.self, "end", role, p.Name, p.V4.String(), strconv.Itoa(n), what}}
}

// shardMain is "end shard-owner PORT ADDR QUEUES WHAT" and "end shard-peer …". With "rate" the peer
// measures; with "idle" both do nothing once they are connected, and the peer listens then.
func shardMain(role, port, addr, queues, what string) error {
	prefix, err := netip.ParsePrefix(addr)
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(queues)
	if err != nil {
		return err
	}
	at := fmt.Sprintf("127.0.0.1:%d", pairPort)
	s, err := openSharded(port, prefix, n)
	if err != nil {
		return err
	}
	defer s.dev.Close()
	if role == "shard-owner" {
		return s.own(at)
	}
	conn, to, err := s.meet(at)
	if err != nil {
		return err
	}
	defer conn.Close()
	if what == "idle" {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", idlePort))
		if err != nil {
			return err
		}
		_, err = l.Accept() // nobody comes
		return err
	}
	v, err := s.rate(to)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(v)
}

func openSharded(port string, addr netip.Prefix, queues int) (s *sharded, err error) {
	s = &sharded{machine: machine{psn: wire.PSN(rand.Uint32() & wire.PSNMask)}}
	if s.dev, err = provider.Open(provider.Config{Port: port, Queues: queues, Addrs: []netip.Prefix{addr}}); err != nil {
		return nil, err
	}
	if s.pd, err = s.dev.AllocPD(); err != nil {
		return nil, err
	}
	for range shardThreads {
		cq, err := s.dev.CreateCQ(2*shardDepth, nil)
		if err != nil {
			return nil, err
		}
		q, err := s.pd.CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: cq, RecvCQ: cq,
			Caps: qp.Caps{SendWR: shardDepth, RecvWR: 1, SendSGE: 1, RecvSGE: 1}})
		if err != nil {
			return nil, err
		}
		s.cqs, s.qps = append(s.cqs, cq), append(s.qps, q)
	}
	if s.mem, err = mr.Alloc(1 << 16); err != nil {
		return nil, err
	}
	clear(s.mem.Bytes()) // so that it is there
	s.reg, err = s.pd.RegMR(s.mem.Bytes(), allRights)
	return s, err
}

func (s *sharded) ends() (e shardEnds, err error) {
	gid, err := s.dev.QueryGID(1)
	for _, q := range s.qps {
		e.Ends = append(e.Ends, end{q.Num(), s.psn, gid[:]})
	}
	e.Addr, e.Key = uint64(s.mem.Addr()), s.reg.RKey()
	return e, err
}

func (s *sharded) connectAll(to shardEnds) error {
	if len(to.Ends) != len(s.qps) {
		return errors.New("not as many queue pairs at the other end")
	}
	for i, q := range s.qps {
		if err := s.bring(q, to.Ends[i], ackTimeout); err != nil {
			return err
		}
	}
	return nil
}

// own lets a peer WRITE, and sleeps until it hangs up.
func (s *sharded) own(at string) error {
	l, err := net.Listen("tcp", at)
	if err != nil {
		return err
	}
	conn, err := l.Accept()
	if err != nil {
		return err
	}
	defer conn.Close()
	var to shardEnds
	dec := json.NewDecoder(conn)
	if err := dec.Decode(&to); err != nil {
		return err
	}
	if err := s.connectAll(to); err != nil {
		return err
	}
	e, err := s.ends()
	if err == nil {
		err = json.NewEncoder(conn).Encode(e)
	}
	if err == nil {
		_ = dec.Decode(&to) // the end of the connection
	}
	return err
}

// meet connects the queue pairs with the owner's.
func (s *sharded) meet(at string) (conn net.Conn, to shardEnds, err error) {
	if conn, err = net.Dial("tcp", at); err != nil {
		return nil, to, err
	}
	e, err := s.ends()
	if err == nil {
		err = json.NewEncoder(conn).Encode(e)
	}
	if err == nil {
		err = json.NewDecoder(conn).Decode(&to)
	}
	if err == nil {
		err = s.connectAll(to)
	}
	return conn, to, err
}

// rate gives how many WRITEs of 64 bytes a second all threads do.
func (s *sharded) rate(to shardEnds) (float64, error) {
	var wg sync.WaitGroup
	var sent [shardThreads]int
	var errs [shardThreads]error
	start := time.Now()
	for i := range shardThreads {
		wg.Go(func() {
			runtime.LockOSThread()
			sent[i], errs[i] = s.stream(i, to, start.Add(shardTime))
		})
	}
	wg.Wait()
	took := time.Since(start).Seconds()
	all := 0
	for _, n := range sent {
		all += n
	}
	return float64(all) / took, errors.Join(errs[:]...)
}

// stream WRITEs on one queue pair until the time has come, shardDepth in flight.
func (s *sharded) stream(i int, to shardEnds, until time.Time) (sent int, err error) {
	sgl := [1]qp.SGE{{Addr: uint64(s.mem.Addr()), Length: manySize, LKey: s.reg.LKey()}}
	wr := [1]qp.SendWR{{Opcode: qp.WRWrite, Flags: qp.SendSignaled, SGL: sgl[:], RemoteAddr: to.Addr + uint64(i)<<12, RKey: to.Key}}
	var wcs [shardDepth]qp.WC
	since, over := time.Now(), false
	for done, spins := 0, 1; !over || done < sent; spins++ {
		for !over && sent-done < shardDepth {
			if _, err := s.qps[i].PostSend(wr[:]); err != nil {
				return sent, err
			}
			if sent++; sent%64 == 0 {
				since = time.Now()
				over = !since.Before(until)
			}
		}
		n := s.cqs[i].Poll(wcs[:])
		for _, wc := range wcs[:n] {
			if wc.Status != qp.WCSuccess {
				return sent, badStatus(wc.Status)
			}
		}
		done += n
		if spins%4096 == 0 && n == 0 && time.Since(since) > stuck {
			return sent, fmt.Errorf("no completion for %v", stuck)
		}
	}
	return sent, nil
}
