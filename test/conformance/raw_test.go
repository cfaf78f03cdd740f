// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"strings"
	"testing"
)

// TestRaw runs the checks of testdata/raw.c: RAW_PACKET queue pairs, flows and counters.
func TestRaw(t *testing.T) {
	t.Run("kernel", func(t *testing.T) { inFabric(t, nil, 0, 1, bin("raw")) })
	t.Run("engines", func(t *testing.T) {
		if out := runPair(t, "--", bin("raw"), "serve", "--", bin("raw"), "send"); !strings.Contains(out, "answered") {
			t.Errorf("no answer:\n%s", out)
		}
	})
}

// rawRuns are runs of perftest's raw_ethernet_bw, in README.md's table. Ethernet loses
// frames when it is full, so they last a second rather than a number of frames.
var rawRuns = []string{
	"raw_ethernet_bw -D 1 -s 1024",
	"raw_ethernet_bw -D 1 -s 8900 -m 9000",
	"raw_ethernet_bw -D 1 -s 64 -I 64",
	"raw_ethernet_bw -D 1 -s 512 --vlan_en",
	"raw_ethernet_bw -D 1 -s 512 --use-srq",
	"raw_ethernet_bw -D 1 -s 512 --odp",
	"raw_ethernet_bw -D 1 -s 512 --promiscuous",
	"raw_ethernet_bw -D 1 -s 512 --sniffer",
	"raw_ethernet_bw -D 1 -s 512 -J 1.2.3.4 -j 1.2.3.5",
	"raw_ethernet_bw -D 1 -s 512 -J 1.2.3.4 -j 1.2.3.4 -K 1234 -k 1234",
	"raw_ethernet_bw -D 1 -s 512 -J 1.2.3.4 -j 1.2.3.4 -K 1234 -k 1234 --tcp",
}

func TestRawEthernet(t *testing.T) {
	for _, r := range rawRuns {
		t.Run(r, func(t *testing.T) {
			args := append([]string{"--", "/usr/bin/python3", "testdata/announce.py"}, perftest(r+" --server -d tapverbs0 -B 02:74:76:00:00:01 -E 02:74:76:00:00:02")...)
			args = append(append(args, "--"), perftest(r+" --client -d tapverbs0 -B 02:74:76:00:00:02 -E 02:74:76:00:00:01")...)
			if out := runPair(t, args...); len(perfRow.FindAllString(out, -1)) != 2 {
				t.Errorf("not both ends have a result:\n%s", out)
			}
		})
	}
}
