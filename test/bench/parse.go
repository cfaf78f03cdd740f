// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// What other programs print.

// perftestBW is the row of one of perftest's bandwidth programs, run with --report_gbits:
// "#bytes #iterations BW peak[Gb/sec] BW average[Gb/sec] MsgRate[Mpps]".
func perftestBW(out string, size int) (gbit, messages float64, err error) {
	v, err := perftestRow(out, size, 5)
	if err != nil {
		return 0, 0, err
	}
	return v[3], v[4] * 1e6, nil
}

// perftestLat is the row of one of its latency programs: "#bytes #iterations t_min t_max
// t_typical t_avg t_stdev 99% percentile 99.9% percentile", all in µs.
func perftestLat(out string, size int) (p50, p99, p999 float64, err error) {
	v, err := perftestRow(out, size, 9)
	if err != nil {
		return 0, 0, 0, err
	}
	return v[4], v[7], v[8], nil
}

func perftestRow(out string, size, columns int) ([]float64, error) {
	for line := range strings.Lines(out) {
		v := numbers(strings.Fields(line))
		// In some runs it misjudges the clock, and prints 0 or inf.
		if len(v) == columns && v[0] == float64(size) && v[columns-1] > 0 && v[columns-1] < 1e12 {
			return v, nil
		}
	}
	return nil, fmt.Errorf("no row for %d bytes: %s", size, lastLines(out))
}

// numbers reads words that all are numbers, C's -nan among them; nil if one is not.
func numbers(words []string) (v []float64) {
	for _, w := range words {
		x, err := strconv.ParseFloat(strings.TrimPrefix(w, "-"), 64)
		if strings.HasPrefix(w, "-") {
			x = -x
		}
		if err != nil {
			return nil
		}
		v = append(v, x)
	}
	return v
}

// iperf3Result is what is used of iperf3's JSON: what the receiver got.
func iperf3Result(out string) (gbit, bytes float64, err error) {
	var r struct {
		Error string
		End   struct {
			Received struct {
				Bytes float64
				Bits  float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		}
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		return 0, 0, err
	}
	if r.Error != "" {
		return 0, 0, errors.New(r.Error)
	}
	if r.End.Received.Bits <= 0 {
		return 0, 0, errors.New("iperf3 says nothing of what was received")
	}
	return r.End.Received.Bits / 1e9, r.End.Received.Bytes, nil
}

// fiPingpong is fi_pingpong's row for a size: "bytes #sent #ack total time MB/sec
// usec/xfer Mxfers/sec", sizes as 4k and 1m. A transfer is half a round trip; the mean is all
// there is, in µs, and what it comes to in 10^6 bytes a second.
func fiPingpong(out string, size int) (mean, mb float64, err error) {
	for line := range strings.Lines(out) {
		w := strings.Fields(line)
		if len(w) != 8 || w[0] != fiSize(size) {
			continue
		}
		if v := numbers(w[5:7]); v != nil {
			return v[1], v[0], nil
		}
	}
	return 0, 0, fmt.Errorf("no row for %d bytes: %s", size, lastLines(out))
}

func fiSize(n int) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return fmt.Sprint(n>>20) + "m"
	case n >= 1<<10 && n%(1<<10) == 0:
		return fmt.Sprint(n>>10) + "k"
	}
	return fmt.Sprint(n)
}

// ucxResult is the last row of ucx_perftest -f: the iterations, a percentile, average and overall
// time in µs, average and overall MB/s (of 2^20 bytes), average and overall messages a second. On a
// terminal "Final:" is in front.
type ucxResult struct{ Percentile, Mean, Gbps, Rate float64 }

func ucxPerftest(out string) (r ucxResult, err error) {
	for line := range strings.Lines(out) {
		w := strings.Fields(strings.Replace(line, "Final:", "", 1))
		if v := numbers(w); len(v) == 8 {
			r = ucxResult{v[1], v[3], v[5] * (1 << 20) * 8 / 1e9, v[7]}
		}
	}
	if r == (ucxResult{}) {
		return r, fmt.Errorf("no results: %s", lastLines(out))
	}
	return r, nil
}

// tcpping's line: "p50 p99 p99.9 mean" in µs.
func tcpPing(out string) (v [4]float64, err error) {
	n := numbers(strings.Fields(out))
	if len(n) != len(v) {
		return v, fmt.Errorf("tcpping printed %q", out)
	}
	return [4]float64(n), nil
}
