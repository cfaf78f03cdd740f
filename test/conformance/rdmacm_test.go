// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// cmChecks are those of testdata/rdmacm.c.
var cmChecks = []string{"addresses", "ports", "options", "devices", "names", "refused", "connected", "untold", "backlog", "datagrams",
	"events", "migrate", "endpoints", "removal", "queues", "groups"}

// TestRDMACM runs the checks of testdata/rdmacm.c, which was built with Debian's headers
// and library.
func TestRDMACM(t *testing.T) {
	for _, c := range cmChecks {
		t.Run(c, func(t *testing.T) { inFabric(t, nil, 0, 1, bin("rdmacm"), c) })
	}
}

// cmRun is a run of programs that connect by the RDMA CM, in README.md's table by the
// client's command.
type cmRun struct {
	server, client string
	// done is what both print at their end, and how often in all.
	done  string
	times int
}

const (
	onAddr  = " -b $TAPVERBS_ADDR"
	onAddr6 = " -b $TAPVERBS_ADDR6"
	toPeer  = " -s $TAPVERBS_PEER"
	toPeer6 = " -s $TAPVERBS_PEER6"
)

// alike is a run of one program, whose ends differ in where they are.
func alike(run, server, client, done string) cmRun {
	return cmRun{run + server, run + client, done, 2}
}

var cmRuns = []cmRun{
	{"rping -s -a $TAPVERBS_ADDR -C 20 -V -v", "rping -c -a $TAPVERBS_PEER -C 20 -V -v", "ping data: rdma-ping-", 40},
	{"rping -s -a $TAPVERBS_ADDR6 -C 20 -V -v", "rping -c -a $TAPVERBS_PEER6 -C 20 -V -v", "ping data: rdma-ping-", 40},
	{"rping -s -C 50 -S 60000 -V -v", "rping -c -a $TAPVERBS_PEER -C 50 -S 60000 -V -v", "ping data: rdma-ping-", 100},
	{"rping -s -C 5 -q -V -v", "rping -c -a $TAPVERBS_PEER -C 5 -q -V -v", "ping data: rdma-ping-", 10}, // queue pairs of its own
	alike("ucmatose -c 100", "", toPeer, "return status 0"),
	alike("ucmatose -c 10 -C 50 -S 5000 -t 32 -a 18", onAddr6, toPeer6, "return status 0"),
	alike("ucmatose -c 10 -m", onAddr, toPeer, "return status 0"),
	alike("ucmatose -c 10 -P ib", "", toPeer, "return status 0"),
	alike("udaddy", "", toPeer, "return status 0"),
	alike("udaddy -c 20 -C 30 -S 1000 -t 32", onAddr6, toPeer6, "return status 0"),
	alike("udaddy -p 0x2", "", toPeer, "return status 0"),
	alike("mckey -m 239.91.1.1", onAddr, onAddr+" -s", "return status 0"),
	alike("mckey -m ff0e::91:1 -C 30 -S 2000", onAddr6, onAddr6+" -s", "return status 0"),
	alike("mckey -M ff0e::91:2", onAddr6, onAddr6+" -s", "return status 0"),
	alike("mckey -m 239.91.1.2 -c 3", onAddr, onAddr+" -s -o", "return status 0"), // the sender only sends
	{"cmtime -c 100", "cmtime -c 100" + toPeer, "us / conn", 1},
	{"rdma_server", "rdma_client" + toPeer, ": end 0", 2},
	{"rdma_xserver -c r", "rdma_xclient -c r" + toPeer, ": end 0", 2},
	{"rdma_xserver -c x", "rdma_xclient -c x" + toPeer, ": end 0", 2}, // XRC
	alike("ib_send_bw -R -a -n 5", "", " $TAPVERBS_PEER", "#bytes"),
	alike("ib_send_bw -R -b -q 4 -n 200", "", " $TAPVERBS_PEER", "#bytes"),
	alike("ib_send_bw -R -c UD", "", " $TAPVERBS_PEER", "#bytes"),
	alike("ib_send_bw -z", "", " $TAPVERBS_PEER", "#bytes"),
	alike("ib_send_lat -R", "", " $TAPVERBS_PEER", "#bytes"),
	alike("ib_send_lat -R -c UD -e", "", " $TAPVERBS_PEER", "#bytes"),
	alike("ib_write_bw -R -T 41 -q 4 -n 200", "", " $TAPVERBS_PEER", "#bytes"),
	alike("ib_write_lat -R", "", " $TAPVERBS_PEER", "#bytes"),
	alike("ib_read_bw -R -n 200", "", " $TAPVERBS_PEER", "#bytes"),
	{"ib_read_lat -R", "ib_read_lat -R $TAPVERBS_PEER", "#bytes", 1},
	alike("ib_atomic_bw -R -n 200", "", " $TAPVERBS_PEER", "#bytes"),
	{"ib_atomic_lat -R", "ib_atomic_lat -R $TAPVERBS_PEER", "#bytes", 1},
}

func TestCMPrograms(t *testing.T) {
	for _, r := range cmRuns {
		t.Run(r.client, func(t *testing.T) {
			var env []string
			if strings.HasPrefix(r.server, "cmtime") { // it serves for ever
				env = []string{foreverEnv + "=1"}
			}
			more := ""
			if strings.HasPrefix(r.client, "ib_") { // see perftest
				more, env = " -F", []string{preloadEnv + "=" + bin("second.so")}
			}
			out := runCM(t, env, r.server+more, r.client+more)
			if n := strings.Count(out, r.done); n != r.times {
				t.Errorf("%q is there %d times, want %d:\n%s", r.done, n, r.times, out)
			}
		})
	}
}

// qperfRuns are qperf's tests with connections by the RDMA CM.
var qperfRuns = []string{"rc_lat", "rc_bw", "rc_bi_bw", "rc_rdma_read_bw", "rc_rdma_read_lat", "rc_rdma_write_bw", "rc_rdma_write_lat",
	"rc_rdma_write_poll_lat", "rc_compare_swap_mr", "rc_fetch_add_mr", "ver_rc_compare_swap", "ver_rc_fetch_add"}

// qperfRefuses are its other tests of RDMA, with what the program says to each. Debian's is built
// without XRC. Those of UC and UD do not use the RDMA CM, "-cm1 set but not used", but LIDs: they make
// address vectors without a GRH, which no RoCE device takes.
var qperfRefuses = []struct{ tests, says string }{
	{"xrc_lat xrc_bw xrc_bi_bw", "bad test"},
	{"uc_lat uc_bw uc_bi_bw uc_rdma_write_bw uc_rdma_write_lat uc_rdma_write_poll_lat", "failed to modify QP to RTR: Invalid argument"},
	{"ud_lat ud_bw ud_bi_bw", "failed to create address handle: Invalid argument"},
}

// TestQperf: its two ends talk by TCP, too, at the same address, which the namespace has for
// that: on the loopback interface, so that the kernel does not answer for it at the ports.
func TestQperf(t *testing.T) {
	var refused string
	for _, r := range qperfRefuses {
		refused += " " + r.tests
	}
	dir := t.TempDir()
	out := inFabric(t, []string{"OUT=" + dir}, 0, 2, "sh", "-c", `set -e
if [ $TAPVERBS_RANK = 0 ]; then
	sysctl -qw net.ipv4.conf.all.arp_ignore=1
	ip addr add $TAPVERBS_ADDR/32 dev lo
	exec qperf
fi
until grep -q ':4D35 .* 0A ' /proc/net/tcp /proc/net/tcp6; do sleep 0.01; done
for t in `+strings.Join(qperfRuns, " ")+`; do qperf -cm1 -cp1 -t 1 $TAPVERBS_PEER $t; done
for t in `+refused+`; do ! qperf -cm1 -cp1 -t 1 $TAPVERBS_PEER $t > $OUT/$t 2>&1; done
qperf $TAPVERBS_PEER quit`)
	for _, r := range qperfRuns {
		if !regexp.MustCompile(`(?m)^` + r + `:\n(warning: .*\n)* +\w+ += +[0-9.]+ `).MatchString(out) {
			t.Errorf("no result of %s:\n%s", r, out)
		}
	}
	for _, r := range qperfRefuses {
		for test := range strings.FieldsSeq(r.tests) {
			if said, err := os.ReadFile(filepath.Join(dir, test)); err != nil || !strings.Contains(string(said), r.says) {
				t.Errorf("%s does not fail with %q: %v: %s", test, r.says, err, said)
			}
		}
	}
}
