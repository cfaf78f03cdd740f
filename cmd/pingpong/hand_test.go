// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
)

// onFabric runs fn with two ports, in a network namespace of its own that the
// processes fn starts are in too.
func onFabric(t *testing.T, fn func(t *testing.T, ports [2]fabric.Port)) {
	t.Helper()
	err := fabric.WithNS(func() error {
		f, err := fabric.New(fabric.Config{})
		if err != nil {
			return err
		}
		defer f.Close()
		var ports [2]fabric.Port
		for i := range ports {
			if ports[i], err = f.AddPort(i); err != nil {
				return err
			}
		}
		fn(t, ports)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func endArgs(p fabric.Port, more ...string) []string {
	return append([]string{"-port", p.Name, "-addr", p.V4.String(), "-addr", p.V6.String()}, more...)
}

// listening starts a server and gives the address it listens at.
func listening(t *testing.T, p fabric.Port, more ...string) (*proc, string) {
	t.Helper()
	s := start(t, nil, endArgs(p, append([]string{"-listen", "127.0.0.1:0"}, more...)...)...)
	return s, s.find("waiting for a client at ")
}

func TestByHand(t *testing.T) {
	for _, gid := range []string{"0", "1", "2"} {
		t.Run("gid "+gid, func(t *testing.T) {
			onFabric(t, func(t *testing.T, ports [2]fabric.Port) {
				s, addr := listening(t, ports[0], "-gid", gid)
				c := start(t, nil, endArgs(ports[1], "-connect", addr, "-gid", gid, "-mr", "resident,cold", "-size", "8,5000", "-iters", "200", "-qp", "2")...)
				if out := c.ok(); !strings.Contains(out, "every byte verified") {
					t.Error(out)
				}
				s.ok()
			})
		})
	}
}

func TestByHandPeerDies(t *testing.T) {
	onFabric(t, func(t *testing.T, ports [2]fabric.Port) {
		for i := range 2 {
			s, addr := listening(t, ports[0])
			c := start(t, nil, endArgs(ports[1], append([]string{"-connect", addr}, forever...)...)...)
			c.find("operation")
			killed, left := s, c
			if i == 1 {
				killed, left = c, s
			}
			if err := killed.cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			left.oneLine("the peer is gone")
			killed.wait()
		}
	})
}

func TestByHandCannotConnect(t *testing.T) {
	onFabric(t, func(t *testing.T, ports [2]fabric.Port) {
		start(t, nil, endArgs(ports[0], "-connect", "127.0.0.1:1")...).oneLine("connection refused")
		start(t, nil, "-connect", "127.0.0.1:1", "-port", "a-name-of-more-than-15-bytes").oneLine("name")

		// Somebody who talks something else.
		s, addr := listening(t, ports[0])
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: somewhere.example.com\r\nAccept: */*\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		s.oneLine("out-of-band")
		conn.Close()

		// Somebody who says nothing, and leaves.
		s, addr = listening(t, ports[0])
		if conn, err = net.Dial("tcp", addr); err != nil {
			t.Fatal(err)
		}
		conn.Close()
		s.oneLine("0 of the 52 bytes")

		// A peer whose engine is not on the fabric.
		s, addr = listening(t, ports[0])
		if conn, err = net.Dial("tcp", addr); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, strings.Replace(golden, "0a4d0001", "0a5b00c8", 1)); err != nil { // 10.91.0.200
			t.Fatal(err)
		}
		s.oneLine("10.91.0.200")
		conn.Close()
	})
}

// ibv is an ibv_rc_pingpong, written from its manual page and source: one buffer for
// what it sends and receives.
type ibv struct {
	dev   *provider.Device
	q     *provider.QP
	cq    *provider.CQ
	buf   *buffer
	size  int
	iters int
	depth int
	mine  dest
}

func newIBV(t *testing.T, p fabric.Port, gid, size, iters int) *ibv {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	b := &ibv{size: size, iters: iters, depth: 500}
	var err error
	b.dev, err = provider.Open(provider.Config{Port: p.Name, Addrs: endAddrs(p)})
	must(err)
	t.Cleanup(func() { b.dev.Close() })
	pd, err := b.dev.AllocPD()
	must(err)
	b.buf, err = newBuffer(pd, size, mr.LocalWrite, false, true)
	must(err)
	for i := range b.buf.bytes() {
		b.buf.bytes()[i] = 0x7b
	}
	b.cq, err = b.dev.CreateCQ(b.depth+1, nil)
	must(err)
	b.q, err = pd.CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: b.cq, RecvCQ: b.cq,
		Caps: qp.Caps{SendWR: 1, RecvWR: b.depth, SendSGE: 1, RecvSGE: 1}})
	must(err)
	must(initQP(b.q, 0))
	for range b.depth {
		must(b.recv())
	}
	g, err := b.dev.QueryGID(gid)
	must(err)
	b.mine = dest{QPN: b.q.Num(), PSN: newPSN(), GID: g}
	return b
}

func (b *ibv) sge() []qp.SGE {
	return []qp.SGE{{Addr: uint64(b.buf.mem.Addr()), Length: uint32(b.size), LKey: b.buf.reg.LKey()}}
}

func (b *ibv) recv() error {
	_, err := b.q.PostRecv([]qp.RecvWR{{ID: 1, SGL: b.sge()}})
	return err
}

func (b *ibv) connect(peer dest, gid int) error {
	return connectQP(b.q, connAttr{mtu: qp.MTU1024, reads: 1, gidIndex: gid, mine: b.mine.PSN, theirs: peer.PSN, peer: peer.QPN, gid: peer.GID})
}

// play is the loop of rc_pingpong.c.
func (b *ibv) play(client bool) error {
	const sendWR, recvWR = 2, 1
	send := func() error {
		_, err := b.q.PostSend([]qp.SendWR{{ID: sendWR, Opcode: qp.WRSend, Flags: qp.SendSignaled, SGL: b.sge()}})
		return err
	}
	pending := uint64(recvWR)
	if client {
		if err := send(); err != nil {
			return err
		}
		pending |= sendWR
	}
	sent, got := 0, 0
	stop := time.Now().Add(patience)
	for wcs := make([]qp.WC, 2); got < b.iters || sent < b.iters; {
		n := b.cq.Poll(wcs)
		if n == 0 && time.Now().After(stop) {
			return fmt.Errorf("stuck with %d received and %d sent", got, sent)
		}
		for _, wc := range wcs[:n] {
			if wc.Status != qp.WCSuccess {
				return errors.New(wc.Status.String())
			}
			if wc.ID == sendWR {
				sent++
			} else {
				got++
				if err := b.recv(); err != nil {
					return err
				}
			}
			pending &^= wc.ID
			if sent < b.iters && pending == 0 {
				if err := send(); err != nil {
					return err
				}
				pending = sendWR | recvWR
			}
		}
	}
	return nil
}

// TestForeignClient: ibv_rc_pingpong is the client, pingpong the server.
func TestForeignClient(t *testing.T) {
	for gid := range 3 {
		onFabric(t, func(t *testing.T, ports [2]fabric.Port) {
			const size, iters = 3000, 400
			s, addr := listening(t, ports[0], "-gid", fmt.Sprint(gid), "-size", fmt.Sprint(size), "-iters", fmt.Sprint(iters))
			b := newIBV(t, ports[1], gid, size, iters)
			conn, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Write(b.mine.encode()); err != nil {
				t.Fatal(err)
			}
			line := make([]byte, destLen)
			if _, err := io.ReadFull(conn, line); err != nil {
				t.Fatal(err)
			}
			peer, err := parseDest(line)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(conn, "done\x00"); err != nil {
				t.Fatal(err)
			}
			conn.Close()
			if err := b.connect(peer, gid); err != nil {
				t.Fatal(err)
			}
			if err := b.play(true); err != nil {
				t.Fatal(err)
			}
			if out := s.ok(); !strings.Contains(out, fmt.Sprintf("%d messages, every byte verified", 2*iters)) {
				t.Error(out)
			}
		})
	}
}

// foreignServer plays ibv_rc_pingpong's server up to the end of the exchange.
func foreignServer(t *testing.T, b *ibv, gid int, args []string) *proc {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c := start(t, nil, append(args, "-connect", l.Addr().String())...)
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	line := make([]byte, destLen)
	if n, err := conn.Read(line); err != nil || n != destLen {
		t.Fatalf("the client's line came in pieces: %d bytes, %v", n, err)
	}
	peer, err := parseDest(line)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.connect(peer, gid); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write(b.mine.encode()); err != nil {
		t.Fatal(err)
	}
	done := make([]byte, len("done")+1)
	if n, err := conn.Read(done); err != nil || string(done[:n]) != "done\x00" {
		t.Fatalf("instead of done: %q, %v", done[:n], err)
	}
	return c
}

// TestForeignServer: ibv_rc_pingpong is the server, pingpong the client.
func TestForeignServer(t *testing.T) {
	for gid := range 3 {
		onFabric(t, func(t *testing.T, ports [2]fabric.Port) {
			// The defaults of both: 4096 bytes, 1000 times.
			b := newIBV(t, ports[0], gid, 4096, 1000)
			file := t.TempDir() + "/report.json"
			c := foreignServer(t, b, gid, endArgs(ports[1], "-gid", fmt.Sprint(gid), "-json", file))
			if err := b.play(false); err != nil {
				t.Fatal(err)
			}
			if out := c.ok(); !strings.Contains(out, "2000 messages, every byte verified") {
				t.Error(out)
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			checkKeys(t, text)
			if !strings.Contains(string(text), `"peer": "ibv_rc_pingpong"`) {
				t.Errorf("%s", text)
			}
		})
	}
}

// TestForeignServerWrong: data that is not what was sent is noticed.
func TestForeignServerWrong(t *testing.T) {
	onFabric(t, func(t *testing.T, ports [2]fabric.Port) {
		b := newIBV(t, ports[0], 1, 4096, 10)
		c := foreignServer(t, b, 1, endArgs(ports[1], "-iters", "10"))
		other, err := newBuffer(b.q.PD(), b.size, mr.LocalWrite, false, true)
		if err != nil {
			t.Fatal(err)
		}
		b.buf = other // sends from here, receives still go to the old one
		if err := b.play(false); err != nil {
			t.Fatal(err)
		}
		c.oneLine("not what was sent")
	})
}

// TestForeignServerDies: no TCP connection tells it, the protocol does.
func TestForeignServerDies(t *testing.T) {
	onFabric(t, func(t *testing.T, ports [2]fabric.Port) {
		b := newIBV(t, ports[0], 1, 4096, 1000)
		c := foreignServer(t, b, 1, endArgs(ports[1]))
		if err := b.dev.Close(); err != nil {
			t.Fatal(err)
		}
		c.oneLine("peer")
	})
}

// TestHotPath: a round allocates nothing per message.
func TestHotPath(t *testing.T) {
	onFabric(t, func(t *testing.T, ports [2]fabric.Port) {
		ends := pairOfEndpoints(t, ports)
		row := rowSpec{opWrite, memResident, 4096}
		s := slots(row, phaseBandwidth, 0)
		var ms [2]*measure
		for i := range ms {
			var err error
			if ms[i], err = newMeasure(ends[i], &plan{}, row, phaseBandwidth, s, i == 0); err != nil {
				t.Fatal(err)
			}
		}
		ms[0].peerLand = ms[1].land.remote(0)
		const count = 200
		stream := func() {
			if _, err := ms[0].stream(0, count, 0, 64); err != nil {
				t.Fatal(err)
			}
		}
		stream() // pools fill
		if who := allocatedIn("(*measure).stream", stream); who != "" {
			t.Errorf("%d messages allocate: %s", count, who)
		}
		if bad := ms[1].verify(0, count, 0, false); bad != "" {
			t.Error(bad)
		}
		// What verifies can also find fault.
		ms[1].land.slot(count - 1)[4095] ^= 1
		if bad := ms[1].verify(0, count, 0, false); bad != "message 199 is wrong from byte 4095 on" {
			t.Errorf("a flipped bit: %q", bad)
		}
	})
}

// allocatedIn runs f and gives a stack through the named function that allocated
// something; "" if there was none. It does not count what other goroutines, the device's
// own and the runtime's, allocate meanwhile, as testing.AllocsPerRun does.
func allocatedIn(name string, f func()) string {
	defer func(rate int) { runtime.MemProfileRate = rate }(runtime.MemProfileRate)
	runtime.MemProfileRate = 1
	before := allocations(name)
	f()
	for stack, n := range allocations(name) {
		if n > before[stack] {
			return fmt.Sprintf("%d times:\n%s", n-before[stack], stack)
		}
	}
	return ""
}

// allocations counts the objects allocated so far, by those stacks that go through the
// named function.
func allocations(name string) map[string]int64 {
	for range 2 { // the profile is published by garbage collections
		runtime.GC()
	}
	n, _ := runtime.MemProfile(nil, true)
	records := make([]runtime.MemProfileRecord, n+100)
	for {
		var ok bool
		if n, ok = runtime.MemProfile(records, true); ok {
			break
		}
		records = make([]runtime.MemProfileRecord, n+100)
	}
	counts := map[string]int64{}
	for _, r := range records[:n] {
		var stack strings.Builder
		for frames := runtime.CallersFrames(r.Stack()); ; {
			f, more := frames.Next()
			fmt.Fprintf(&stack, "\t%s:%d\n", f.Function, f.Line)
			if !more {
				break
			}
		}
		if strings.Contains(stack.String(), name) {
			counts[stack.String()] += r.AllocObjects
		}
	}
	return counts
}

func endAddrs(p fabric.Port) []netip.Prefix { return []netip.Prefix{p.V4, p.V6} }

// pairOfEndpoints connects two endpoints in this process.
func pairOfEndpoints(t *testing.T, ports [2]fabric.Port) (ends [2]*endpoint) {
	t.Helper()
	for i, p := range ports {
		e, err := openEndpoint(t.Context(), &options{port: p.Name, addrs: endAddrs(p), gid: 1}, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := e.close(); err != nil {
				t.Error(err)
			}
		})
		if err := errors.Join(e.makeBuffers(1<<20, 1), e.makeQPs(1, 64)); err != nil {
			t.Fatal(err)
		}
		ends[i] = e
	}
	for i, e := range ends {
		peer := ends[1-i]
		gid, err := peer.dev.QueryGID(1)
		if err != nil {
			t.Fatal(err)
		}
		e.peer = gid
		if err := e.connectAll(peer.ends(), qp.MTU4096); err != nil {
			t.Fatal(err)
		}
	}
	return ends
}
