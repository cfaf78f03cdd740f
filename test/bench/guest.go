// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The kernel's soft-RoCE (rdma_rxe) against tapverbs, both in one virtual machine, which a
// program runs: that of test/interop, or another; README.md says what it must understand.

// labPart is the part's name.
const labPart = "lab"

// guestRounds are as many as the guest, which may be emulated, is put to at most; no more is
// begun after the first that would end later than guestTime after it.
const (
	guestRounds = 3
	guestTime   = 5 * time.Minute
)

// guestRuns are runs of perftest in the guest, short as that is slow.
var guestRuns = []perfRun{
	{"write", 1 << 20, "ib_write_bw -n 100"},
	{"write", 64 << 10, "ib_write_bw -n 2000"},
	{"write", 64, "ib_write_bw -n 20000"},
	{"read", 64 << 10, "ib_read_bw -n 2000"},
	{"send", 64 << 10, "ib_send_bw -n 2000"},
	{"write", 8, "ib_write_lat -n 2000"},
	{"send", 8, "ib_send_lat -n 2000"},
	{"send events", 8, "ib_send_lat -n 1000 -e"},
}

// guestSetup unpacks tapverbs, and makes a veth with rxe on both ends. rxe knows the
// initial network namespace alone, so both ends are there, and rules see to it that what one
// sends to the other goes by the wire.
const guestSetup = `set -e
mkdir -p /tmp/tapverbs
tar -xf /tmp/tapverbs.tar -C /tmp/tapverbs
modprobe tun || true
modprobe bridge || true
[ -e /sys/class/infiniband/rxea ] && exit 0
modprobe veth || true
ip link add bva mtu 9000 type veth peer name bvb mtu 9000
ip addr add 10.92.0.1/32 dev bva
ip addr add 10.92.0.2/32 dev bvb
ip link set bva up
ip link set bvb up
ip route add 10.92.0.2 dev bva src 10.92.0.1 table 92
ip route add 10.92.0.1 dev bvb src 10.92.0.2 table 92
for d in bva bvb; do
	echo 1 >/proc/sys/net/ipv4/conf/$d/accept_local
	echo 0 >/proc/sys/net/ipv4/conf/$d/rp_filter
	ip rule add pref 1 iif $d lookup local
done
ip neigh add 10.92.0.2 lladdr $(cat /sys/class/net/bvb/address) dev bva nud permanent
ip neigh add 10.92.0.1 lladdr $(cat /sys/class/net/bva/address) dev bvb nud permanent
ip rule add pref 10 lookup 92
ip rule add pref 20 lookup local
ip rule del pref 0
rdma link add rxea type rxe netdev bva
rdma link add rxeb type rxe netdev bvb
`

// guestPair runs a program of perftest twice: guestPair rxe|tapverbs PROGRAM ARGUMENT...
const guestPair = `who=$1; shift
listens() {
	i=0
	until grep -qE ":4853 [0-9A-F:]+ 0A" /proc/net/tcp /proc/net/tcp6 || [ $i -gt 200 ]; do sleep 0.1; i=$((i + 1)); done
}
case $who in
rxe)
	"$@" -d rxea >/tmp/server.log 2>&1 &
	listens
	"$@" -d rxeb 127.0.0.1 || { s=$?; cat /tmp/server.log; kill $!; exit $s; }
	wait $!;;
tapverbs)
	exec /tmp/tapverbs/tapverbs run -n 2 -- sh /tmp/pair.sh rank "$@";;
rank)
	if [ $TAPVERBS_RANK = 0 ]; then exec "$@" >/tmp/server.log 2>&1; fi
	listens
	exec "$@" 127.0.0.1;;
esac
`

// name is the program and what its messages are.
func (p perfRun) name() string {
	name := strings.Fields(p.args)[0]
	if strings.HasSuffix(p.what, "events") {
		name += " -e"
	}
	return name + ", " + size(p.size)
}

// metric is what counts of it.
func (p perfRun) metric() string {
	switch {
	case !strings.Contains(p.args, "_bw"):
		return p50
	case p.size < 4096:
		return rate
	}
	return gbps
}

func (b *book) printGuest(w io.Writer, only []string) {
	if !slices.Contains(only, labPart) {
		return
	}
	fmt.Fprint(w, "| in one guest | tapverbs | rxe |\n|---|---:|---:|\n")
	for _, g := range guestRuns {
		fmt.Fprintf(w, "| %s, %s | %s | %s |\n", g.name(), unit(g.metric()),
			b.cell(k("guest tapverbs", g.what, g.size, g.metric())), b.cell(k("guest rxe", g.what, g.size, g.metric())))
	}
	if names, _ := b.ofRXE(); names != nil {
		fmt.Fprint(w, "\n![of the kernel's soft-RoCE](plots/guest.svg)\n")
	}
}

var errNoLab = errors.New("no lab given")

// lab is the program.
type lab struct {
	program string
	here    thread
}

// do runs the program with arguments.
func (l lab) do(most time.Duration, args ...string) (string, error) {
	r, err := command{at: l.here, args: append([]string{l.program}, args...)}.start()
	if err != nil {
		return "", err
	}
	if err := r.wait(most); err != nil {
		return "", fmt.Errorf("%s %s: %w", filepath.Base(l.program), args[0], err)
	}
	return r.out.String(), nil
}

// run runs a line of shell in the guest.
func (l lab) run(seconds int, line string) (string, error) {
	return l.do(time.Duration(seconds+20)*time.Second, "run", "-t", strconv.Itoa(seconds), line)
}

// file puts a file into the guest.
func (l lab) file(dir, name, content string) error {
	f := filepath.Join(dir, name)
	if err := os.WriteFile(f, []byte(content), 0o600); err != nil {
		return err
	}
	_, err := l.do(time.Minute, "put", "1", f, "/tmp/"+name)
	return err
}

// guest measures in the virtual machine.
func (r *room) guest(b *book, program string) {
	b.round = 0
	if program == "" {
		b.try(labPart, key{}, errNoLab)
		return
	}
	l := lab{program, r.here}
	if _, err := l.run(10, "true"); err != nil {
		if _, err := l.do(5*time.Minute, "up", "-n", "1", "-k", "6.12", "-s", "2"); err != nil {
			b.try(labPart, key{}, err)
			return
		}
		defer func() {
			if _, err := l.do(time.Minute, "down"); err != nil {
				fmt.Fprintln(os.Stderr, "bench:", err)
			}
		}()
	}
	if err := l.prepare(r); err != nil {
		b.try(labPart, key{}, err)
		return
	}
	begin := time.Now()
	for b.round = range min(b.Rounds, guestRounds) {
		since := time.Now()
		if took := since.Sub(begin); b.round > 0 && took+took/time.Duration(b.round) > guestTime {
			break
		}
		for _, p := range guestRuns {
			for _, who := range []string{"rxe", "tapverbs"} {
				b.try(labPart, key{Who: "guest " + who, What: p.what, X: p.size}, l.perf(b, who, p))
			}
		}
		fmt.Fprintf(os.Stderr, "round %d, %s: %.1f s, load %s\n", b.round+1, labPart, time.Since(since).Seconds(), loadAverage())
	}
}

func (l lab) prepare(r *room) error {
	tar := filepath.Join(r.dir, "tapverbs.tar")
	t, err := command{at: r.here, args: []string{"tar", "-cf", tar, "-C", r.bin, "tapverbs", "lib"}}.start()
	if err == nil {
		err = t.wait(time.Minute)
	}
	if err == nil {
		_, err = l.do(2*time.Minute, "put", "1", tar, "/tmp/tapverbs.tar")
	}
	if err == nil {
		err = l.file(r.dir, "setup.sh", guestSetup)
	}
	if err == nil {
		err = l.file(r.dir, "pair.sh", guestPair)
	}
	if err == nil {
		_, err = l.run(60, "sh /tmp/setup.sh")
	}
	return err
}

// perf is one run of a program of perftest, again if it misjudges the guest's clock.
func (l lab) perf(b *book, who string, p perfRun) (err error) {
	// A local ACK timeout of 1 s (-u 18), as an emulated guest may be away for long.
	line := fmt.Sprintf("sh /tmp/pair.sh %s %s -F -x 1 -u 18 -s %d", who, p.args, p.size)
	if p.metric() != p50 {
		line += " -t 16 --report_gbits"
	}
	for range 3 {
		var out string
		if out, err = l.run(60, line+" 2>&1"); err != nil {
			return err
		}
		if err = p.enter(b, "guest "+who, out); err == nil {
			return nil
		}
	}
	return err
}
