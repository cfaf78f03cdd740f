// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/tapverbs/tapverbs/internal/stats"
)

// What is compared: each part measures everything in it once a round, and the parts take
// turns, so that what else goes on in the machine meets all alike.

// part is one of them; needs is a program of Debian's that has to be there. What fails within it
// it enters by itself, and goes on; an error is about all of it.
type part struct {
	name, needs string
	run         func(r *room, b *book) error
}

var parts = []part{
	{"raw", "", rawPart},
	{"pingpong", "", pingpongPart},
	{"depth", "", depthPart},
	{"perftest", "", perftestPart},
	{"tcp", "", tcpPart},
	{"libfabric", "fi_pingpong", libfabricPart},
	{"ucx", "ucx_perftest", ucxPart},
	{"cpu", "", cpuPart},
	{"many", "", pairParts("many")},
	{"loss", "", pairParts("loss")},
	{"c", "cc", cPart},
	{"shards", "", shardsPart},
	{"profile", "", profilePart},
	{"idle", "", idlePart},
}

// sizes are those of messages, in bytes.
var sizes = []int{8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20}

// depths are how many WRITEs of 64 bytes are in flight.
var depths = []int{1, 4, 16, 64, 128, 256}

// oobPort is where pingpong and perftest meet.
const oobPort = 18515

// pongReport is what is used of pingpong's JSON.
type pongReport struct {
	Rows []struct {
		Op      string       `json:"op"`
		Mem     string       `json:"mr"`
		Size    int          `json:"size"`
		Latency stats.Micros `json:"latency_us"`
		Rate    float64      `json:"messages_per_s"`
		Gbps    float64      `json:"bandwidth_gbps"`
		Problem string       `json:"problem"`
	}
}

// pong runs pingpong with flags for the client; latency and all else go into the book, as
// what it did with suffix.
func (r *room) pong(b *book, suffix string, x int, flags ...string) error {
	file := filepath.Join(r.dir, "pingpong.json")
	end := func(i int, more ...string) command {
		p := r.ports[i]
		return command{at: r.here, args: append([]string{filepath.Join(r.bin, "pingpong"), "-port", p.Name, "-addr", p.V4.String()}, more...)}
	}
	at := fmt.Sprintf("127.0.0.1:%d", oobPort)
	if _, err := pair(end(0, "-listen", at), end(1, append(flags, "-connect", at, "-json", file)...), oobPort); err != nil {
		return err
	}
	j, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var rep pongReport
	if err := json.Unmarshal(j, &rep); err != nil {
		return err
	}
	for _, w := range rep.Rows {
		if w.Problem != "" {
			return fmt.Errorf("pingpong, %s of %d bytes: %s", w.Op, w.Size, w.Problem)
		}
		what, n := w.Op, w.Size
		if w.Mem != "resident" {
			what += " " + w.Mem
		}
		if what += suffix; x > 0 {
			n = x
		}
		addMicros(b, "pingpong", what, n, w.Latency)
		b.add("pingpong", what, n, rate, w.Rate)
		b.add("pingpong", what, n, gbps, w.Gbps)
	}
	return nil
}

// joined joins numbers for a flag that takes a list.
func joined(ns []int) string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(ns), " ", ","), "[]")
}

func pingpongPart(r *room, b *book) error {
	for _, op := range []string{"write", "send", "read"} {
		b.try("pingpong", key{Who: "pingpong", What: op}, r.pong(b, "", 0, "-op", op, "-mr", "resident", "-size", joined(sizes)))
	}
	b.try("pingpong", key{Who: "pingpong", What: "write cold"}, r.pong(b, "", 0, "-op", "write", "-mr", "cold", "-size", "4K,256K,1M"))
	for _, op := range []string{"send", "write-imm"} {
		b.try("pingpong", key{Who: "pingpong", What: op + " events"}, r.pong(b, " events", 0, "-op", op, "-mr", "resident", "-size", "8,4K", "-events"))
	}
	return nil
}

func depthPart(r *room, b *book) error {
	for _, d := range depths {
		b.try("depth", key{Who: "pingpong", What: "write depth", X: d},
			r.pong(b, " depth", d, "-op", "write", "-mr", "resident", "-size", "64", "-depth", strconv.Itoa(d)))
		b.try("depth", key{Who: "perftest", What: "write depth", X: d}, r.perfDepth(b, d))
	}
	return nil
}
