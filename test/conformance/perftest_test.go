// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"regexp"
	"strings"
	"testing"
)

// perfRuns are runs of perftest's programs, in README.md's table: pairs of the same
// command, server and client. What they print about speed is not looked at. Over UC
// what is lost is waited for in vain, so those runs send no more packets than a port's
// queue holds (fabric.DefaultTxQueueLen), however long a busy machine lets it wait.
var perfRuns = []string{
	"ib_send_bw -x 1 -a -n 5",
	"ib_send_bw -x 1 -c UC -a -n 5",
	"ib_send_bw -x 1 -c UD -a -n 5",
	"ib_send_bw -x 1 -c XRC -a -n 5",
	"ib_send_bw -x 1 -q 16 -n 200",
	"ib_send_bw -x 1 -c UC -q 16 -n 100",
	"ib_send_bw -x 1 -c UD -q 16 -n 200",
	"ib_send_bw -x 1 -c XRC -q 16 -n 200",
	"ib_send_bw -x 1 -e",
	"ib_send_bw -x 1 -c UC -e",
	"ib_send_bw -x 1 -c UD -e",
	"ib_send_bw -x 1 -c XRC -e",
	"ib_send_bw -x 1 -I 128 -s 128",
	"ib_send_bw -x 1 -c UD -I 128 -s 128",
	"ib_send_bw -x 1 -b",
	"ib_send_bw -x 1 -c UC -b",
	"ib_send_bw -x 1 -c UD -b",
	"ib_send_bw -x 1 -c XRC -b",
	"ib_send_bw -x 1 --odp",
	"ib_send_bw -x 1 -l 8 --recv_post_list 8",
	"ib_send_bw -x 1 --use-srq -q 4 -n 200",
	"ib_send_bw -x 1 --use_old_post_send",
	"ib_send_bw -x 1 -s 256 -n 100000",
	"ib_send_bw -x 0 -m 1024",
	"ib_send_bw -x 2 -Q 10 -t 50 -r 300",
	"ib_send_bw -x 1 --mr_per_qp -q 4 -n 200",
	"ib_send_bw -x 1 -N --reversed",
	"ib_send_bw -x 1 -D 1 --cpu_util",
	"ib_send_lat -x 1 -a -n 5",
	"ib_send_lat -x 1 -c UC",
	"ib_send_lat -x 1 -c UD",
	"ib_send_lat -x 1 -c XRC",
	"ib_send_lat -x 1 -e",
	"ib_send_lat -x 1 -c UD -e",
	"ib_send_lat -x 1 -I 64 -s 64",
	"ib_send_lat -x 1 --odp",
	"ib_write_bw -x 1 -a -n 5",
	"ib_write_bw -x 1 -c UC -n 1000",
	"ib_write_bw -x 1 -c XRC -n 1000",
	"ib_write_bw -x 1 -q 16 -n 200",
	"ib_write_bw -x 1 -c UC -q 16 -n 100",
	"ib_write_bw -x 1 -c XRC -q 16 -n 200",
	"ib_write_bw -x 1 -I 128 -s 128",
	"ib_write_bw -x 1 -b -n 1000",
	"ib_write_bw -x 1 --odp -n 1000",
	"ib_write_bw -x 1 -l 8 -n 1000",
	"ib_write_bw -x 1 -s 64 -n 100000",
	"ib_write_bw -x 1 --perform_warm_up -n 1000",
	"ib_write_lat -x 1 -a -n 5",
	"ib_write_lat -x 1 -c UC",
	"ib_write_lat -x 1 -c XRC",
	"ib_write_lat -x 1 -I 64 -s 64",
	"ib_write_lat -x 1 --odp",
	"ib_read_bw -x 1 -a -n 5",
	"ib_read_bw -x 1 -c XRC",
	"ib_read_bw -x 1 -q 16 -n 200",
	"ib_read_bw -x 1 -e",
	"ib_read_bw -x 1 -b",
	"ib_read_bw -x 1 --odp",
	"ib_read_bw -x 1 -l 8",
	"ib_read_bw -x 1 -o 4",
	"ib_read_bw -x 1 -s 1024 -n 50000",
	"ib_read_lat -x 1 -a -n 5",
	"ib_read_lat -x 1 -c XRC",
	"ib_read_lat -x 1 -e",
	"ib_read_lat -x 1 --odp",
	"ib_atomic_bw -x 1",
	"ib_atomic_bw -x 1 -c XRC",
	"ib_atomic_bw -x 1 -A CMP_AND_SWAP",
	"ib_atomic_bw -x 1 -q 16 -n 200",
	"ib_atomic_bw -x 1 -e",
	"ib_atomic_bw -x 1 -b",
	"ib_atomic_bw -x 1 -l 8",
	"ib_atomic_bw -x 1 -n 50000",
	"ib_atomic_lat -x 1",
	"ib_atomic_lat -x 1 -c XRC",
	"ib_atomic_lat -x 1 -A CMP_AND_SWAP",
	"ib_atomic_lat -x 1 -e",
}

// perftest is the words of a run, and -F: on a busy machine the program cannot find out how
// fast the processor's clock is ("Correlation coefficient", "Can't produce a report"), and
// would fail for want of a number to print.
func perftest(run string) []string { return append(strings.Fields(run), "-F") }

// A row of results: the size, the iterations, and what was measured.
var perfRow = regexp.MustCompile(`(?m)^ \d+ +\d+ +(\d+\.\d+|inf|-?nan) `)

func TestPerftest(t *testing.T) {
	for _, r := range perfRuns {
		t.Run(r, func(t *testing.T) {
			want := 1
			switch {
			case strings.Contains(r, " -a ") && strings.Contains(r, " UD "):
				want = 12 // 2 to 4096 bytes: a datagram is one packet
			case strings.Contains(r, " -a "):
				want = 23 // 2 bytes to 8 MiB
			}
			out := runPair(t, append([]string{"--"}, perftest(r)...)...)
			if n := len(perfRow.FindAllString(out, -1)); n < want {
				t.Errorf("%d rows of results, at least %d expected:\n%s", n, want, out)
			}
		})
	}
}
