// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

// published is a directory of files that a device keeps up to date.
type published struct {
	*testing.T
	dir string
}

func publish(t *testing.T) published {
	p := published{t, t.TempDir()}
	for path, content := range provider.PublishedFiles() {
		path = filepath.Join(p.dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

func (p published) read(path string) string {
	p.Helper()
	b, err := os.ReadFile(filepath.Join(p.dir, "ports/1", path))
	if err != nil {
		p.Fatal(err)
	}
	return strings.TrimSuffix(string(b), "\n")
}

// number reads a counter, which is never without one.
func (p published) number(path string) uint64 {
	p.Helper()
	n, err := strconv.ParseUint(p.read(path), 10, 64)
	if err != nil {
		p.Fatal(err)
	}
	return n
}

// until waits for something that nobody tells of.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("still not: " + what)
		}
	}
}

// sends has n SENDs of a connection done.
func sends(t *testing.T, c *harness.Conn, n int) {
	t.Helper()
	for i := range n {
		c.B.Recv(uint64(i), 0, 100)
		c.A.Send(c.A.Message(uint64(i), 0, 100))
		var wcs [1]qp.WC
		for _, e := range []*harness.End{c.A, c.B} {
			if n, err := e.CQ.Wait(context.Background(), wcs[:]); n != 1 || err != nil || wcs[0].Status != qp.WCSuccess {
				t.Fatalf("%d, %v, %+v", n, err, wcs[0])
			}
		}
	}
}

// TestPublish: the files say what has happened, soon after it and once nothing happens
// any more, and go on where a process before left them.
func TestPublish(t *testing.T) {
	f := publish(t)
	base := filepath.Join(f.dir, "ports/1/hw_counters/rdma_sends")
	if err := os.WriteFile(base, []byte("1000\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	// One that is not there is left alone.
	if err := os.Remove(filepath.Join(f.dir, "ports/1/counters/symbol_error")); err != nil {
		t.Fatal(err)
	}
	p := harness.NewLivePair(t, taptest.Config{}, func(i int, c *provider.Config) {
		if i == 0 {
			c.Sysfs = f.dir
		}
	})
	c := p.Connect(harness.ConnOptions{Timeout: 20, RetryCnt: 7})
	d := p.Dev[0]
	for round := range 3 {
		sends(t, c, 10)
		want := uint64(1000 + 10*(round+1))
		until(t, "rdma_sends "+strconv.FormatUint(want, 10), func() bool { return f.number("hw_counters/rdma_sends") == want })
		until(t, "rest", d.Dozing)
	}
	st := d.Protocol()
	if n := st.SentPkts.Load(); n < 30 {
		t.Errorf("%d packets sent", n)
	}
	// A peer that is slow to answer is probed: then there are more packets than messages, and
	// an answer that comes late is counted late.
	none := func() uint64 { return 0 }
	for path, want := range map[string]func() uint64{
		"counters/port_xmit_packets": st.SentPkts.Load, "counters/unicast_xmit_packets": st.SentPkts.Load,
		"counters/port_rcv_packets": st.RcvdPkts.Load, "hw_counters/rcvd_pkts": st.RcvdPkts.Load,
		"hw_counters/sent_pkts": st.SentPkts.Load, "counters/multicast_xmit_packets": none, "counters/VL15_dropped": none,
		// Ethernet, IPv4, UDP, BTH, 100 bytes, ICRC, in words of 4 bytes.
		"counters/port_xmit_data": func() uint64 { return st.SentPkts.Load() * (14 + 20 + 8 + 12 + 100 + 4) / 4 },
	} {
		until(t, path, func() bool { return f.number(path) == want() })
	}
	if f.read("state") != "4: ACTIVE" || f.read("phys_state") != "5: LinkUp" {
		t.Errorf("%s, %s", f.read("state"), f.read("phys_state"))
	}
	// What nobody has waited for is written at the end.
	sends(t, c, 5)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if n := f.number("hw_counters/rdma_sends"); n != 1035 {
		t.Errorf("%d at the end", n)
	}
}

// TestPublishNowhere: a directory that is not there is no reason to have no device.
func TestPublishNowhere(t *testing.T) {
	p := harness.NewLivePair(t, taptest.Config{}, func(_ int, c *provider.Config) { c.Sysfs = "/nowhere" })
	sends(t, p.Connect(harness.ConnOptions{Timeout: 20, RetryCnt: 7}), 3)
}
