// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/test/interop/lab"
	"github.com/tapverbs/tapverbs/wire"
)

// capture is what passes the guest's port, as tcpdump writes it.
type capture struct {
	t    *testing.T
	file string
	tcpd *exec.Cmd
	wait func() error
	said buffer
	end  chan struct{}
}

// newCapture begins one.
func newCapture(t *testing.T, ctx context.Context) *capture {
	t.Helper()
	c := &capture{t: t, file: filepath.Join(t.TempDir(), "pcap"), end: make(chan struct{})}
	// Its ring has room for the longest frame in each slot: with these, for 8,000 frames that it has
	// had no time to read.
	c.tcpd = exec.Command("tcpdump", "-i", lab.Port, "-s", "16000", "-U", "--immediate-mode", "-B", "131072", "-Z", "root", "-w", c.file,
		"udp port 4791 or udp port 9")
	c.tcpd.Stderr = &c.said
	var err error
	if c.wait, err = fabric.StartHere(c.tcpd); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = c.wait() // its status says nothing: it is ended by a signal
		close(c.end)
	}()
	stop := context.AfterFunc(ctx, func() { _ = c.tcpd.Process.Kill() })
	t.Cleanup(func() {
		_ = c.tcpd.Process.Kill()
		<-c.end
		stop()
		if dir := os.Getenv("INTEROP_KEEP"); dir != "" {
			_ = os.Rename(c.file, filepath.Join(dir, strings.NewReplacer("/", "_", " ", "_").Replace(t.Name())+".pcap"))
		}
	})
	if !c.said.until("listening on", c.end) {
		t.Fatalf("tcpdump: %s", c.said.String())
	}
	return c
}

// lastWords go to the guest's discard port when a capture ends: what has passed before them is
// in the file when they are. tcpdump drops what it has not read yet when it is told to end.
const lastWords = "that was all that this capture is about"

// stop ends it; all that had passed before is in the file.
func (c *capture) stop() {
	c.t.Helper()
	guest, err := net.Dial("udp", lab.GuestAddr+":9")
	if err != nil {
		c.t.Fatal(err)
	}
	defer guest.Close()
	for deadline := time.Now().Add(caseTime); ; {
		// Again and again: the guest is asked for its Ethernet address first, and may be away.
		_, _ = guest.Write([]byte(lastWords)) // nobody listens there, which the next one is told
		time.Sleep(20 * time.Millisecond)     // tcpdump does not tell
		b, err := os.ReadFile(c.file)
		if err == nil && bytes.Contains(b, []byte(lastWords)) {
			break
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("tcpdump does not write: %v %s", err, c.said.String())
		}
	}
	if err := c.tcpd.Process.Signal(syscall.SIGINT); err != nil && !errors.Is(err, os.ErrProcessDone) {
		c.t.Error(err)
	}
	<-c.end
	if !strings.Contains(c.said.String(), "\n0 packets dropped by kernel") {
		c.t.Errorf("tcpdump has missed something: %s", c.said.String())
	}
}

// packet is a RoCE packet that passed.
type packet struct {
	fromUs bool
	bth    wire.BTH
	data   []byte // what follows the BTH, with the ICRC
}

// packets are those that passed, in order.
func (c *capture) packets() (ps []packet) {
	c.t.Helper()
	b, err := os.ReadFile(c.file)
	if err != nil {
		c.t.Fatal(err)
	}
	if len(b) < 24 {
		return nil // it has just begun
	}
	if binary.LittleEndian.Uint32(b) != 0xa1b2c3d4 {
		c.t.Fatal("no capture")
	}
	for b = b[24:]; len(b) >= 16; {
		n := int(binary.LittleEndian.Uint32(b[8:]))
		if len(b) < 16+n {
			break // the rest is being written
		}
		frame := b[16:][:n]
		b = b[16+n:]
		if p, ok := roce(frame); ok {
			ps = append(ps, p)
		}
	}
	return ps
}

// roce takes a frame apart; without VLAN tags and options, as nobody here has them.
func roce(f []byte) (p packet, ok bool) {
	if len(f) < 14+20+8+wire.BTHLen+4 {
		return p, false
	}
	udp := f[14+20:]
	switch binary.BigEndian.Uint16(f[12:]) {
	case 0x0800:
		p.fromUs = f[14+12+3] == 50
	case 0x86dd:
		udp = f[14+40:]
		p.fromUs = f[14+8+15] == 0x50
	default:
		return p, false
	}
	if len(udp) < 8+wire.BTHLen+4 || binary.BigEndian.Uint16(udp[2:]) != 4791 {
		return p, false
	}
	p.bth = wire.ParseBTH(udp[8:])
	p.data = udp[8+wire.BTHLen:]
	return p, true
}

// until waits until such a packet has passed.
func (c *capture) until(ctx context.Context, what string, is func(packet) bool) {
	c.t.Helper()
	for !slices.ContainsFunc(c.packets(), is) {
		select {
		case <-time.After(20 * time.Millisecond): // tcpdump does not tell
		case <-ctx.Done():
			c.t.Fatalf("no %s was seen: %v", what, context.Cause(ctx))
		}
	}
}

// finish ends it and has tshark look at it, which must know the packets, and find nothing
// malformed.
func (c *capture) finish() {
	c.t.Helper()
	c.stop()
	// It would take messages of programs, the kernel's too, for NFS's.
	tshark := func(args ...string) *exec.Cmd {
		return exec.Command("tshark", append([]string{"--disable-protocol", "rpcordma", "-r", c.file}, args...)...)
	}
	// A line for each: an opcode if it is known, and a word if it is malformed. tshark takes its
	// time to start.
	out, err := tshark("-Y", "infiniband.bth || _ws.malformed", "-T", "fields", "-e", "infiniband.bth.opcode", "-e", "_ws.malformed").Output()
	if err != nil {
		c.t.Fatalf("tshark: %v", err)
	}
	known, bad := 0, 0
	for line := range strings.Lines(string(out)) {
		opcode, malformed, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		if opcode != "" {
			known++
		}
		if malformed != "" {
			bad++
		}
	}
	if known == 0 {
		c.t.Error("tshark has seen no packets of RoCE")
	}
	if bad != 0 {
		out, _ := tshark("-Y", "_ws.malformed").Output()
		c.t.Errorf("tshark finds %d packets malformed:\n%.3000s", bad, out)
	}
	fmt.Printf("     %d packets, %d of them malformed in tshark's view\n", known, bad)
}
