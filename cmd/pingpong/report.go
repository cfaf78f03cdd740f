// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"os"

	"github.com/tapverbs/tapverbs/internal/stats"
)

// report is what -json writes. Times are in microseconds, sizes in bytes, memory
// in KiB as /proc/self/status counts it, bandwidth in 10^9 bits of payload per
// second.
type report struct {
	Program string `json:"program"`
	Version string `json:"version"`
	Started string `json:"started"` // RFC 3339
	Kernel  string `json:"kernel"`
	Go      string `json:"go"`
	Arch    string `json:"arch"`
	CPUs    int    `json:"cpus"`

	Peer  string `json:"peer"` // "pingpong" or "ibv_rc_pingpong"
	MTU   int    `json:"mtu"`
	Depth int    `json:"depth"`
	QPs   int    `json:"qps"`
	Seed  uint64 `json:"seed"`
	Wait  string `json:"wait"` // "poll" or "events"
	// Budget is that of evicting memory in percent, Suspend how long a suspending region
	// is suspended, and how often.
	Budget  int    `json:"budget_percent"`
	Suspend string `json:"suspend"`
	Paging  string `json:"paging"` // "userfault" or "kernel", of memory that is not pinned
	// Tap is what was agreed with the kernel about the client's TAP.
	Tap   string   `json:"tap"`
	Notes []string `json:"notes,omitempty"`

	Rows []row `json:"rows"`

	Verified bool `json:"verified"` // of all rows
	// PageFaults counts the pages, at both ends, that a message found absent;
	// PagesWritten those of cold memory that messages were aimed at.
	PageFaults   uint64 `json:"page_faults"`
	PagesWritten uint64 `json:"pages_written"`
	// Locked is the most that either end had locked while it measured.
	Locked int64 `json:"locked_kib"`
	// RSS is the server's, which most messages land at.
	RSS     rssReport             `json:"rss_kib"`
	Ends    map[string]*endReport `json:"ends"`
	Seconds float64               `json:"seconds"`
}

// row is one line of the table.
type row struct {
	Op   string `json:"op"`
	Mem  string `json:"mr"`
	Size int    `json:"size"`
	// Of says what Latency is: "half round trip" or "whole operation".
	Of       string       `json:"latency_of"`
	Latency  stats.Micros `json:"latency_us"`
	Gbps     float64      `json:"bandwidth_gbps"`
	Rate     float64      `json:"messages_per_s"`
	Verified bool         `json:"verified"`
	// Messages counts those of both measurements, pongs included.
	Messages     uint64 `json:"messages"`
	PageFaults   uint64 `json:"page_faults"`
	PagesWritten uint64 `json:"pages_written"` // of cold memory, else 0
	moves               // of evicting and suspending memory, else 0
	Locked       int64  `json:"locked_kib"`
	Paging       string `json:"paging"`
	Problem      string `json:"problem,omitempty"`
}

// rssReport is a process's resident memory in KiB: before the first measurement,
// after the last, and the most there was (VmHWM).
type rssReport struct {
	Before int64 `json:"before"`
	After  int64 `json:"after"`
	Peak   int64 `json:"peak"`
}

// endReport is about one of the two processes.
type endReport struct {
	PageFaults uint64    `json:"page_faults"`
	Locked     int64     `json:"locked_kib"`
	RSS        rssReport `json:"rss_kib"`
	// Counters are the engine's, by the names of the kernel's soft-RoCE.
	Counters map[string]uint64 `json:"counters,omitempty"`
}

// add counts a finished row.
func (r *report) add(w row) {
	if len(r.Rows) == 0 {
		r.Verified = true
	}
	r.Rows = append(r.Rows, w)
	r.Verified = r.Verified && w.Verified
	r.PageFaults += w.PageFaults
	r.PagesWritten += w.PagesWritten
	r.Locked = max(r.Locked, w.Locked)
}

// coldFaults is the page faults of cold memory.
func (r *report) coldFaults() (n uint64) {
	for _, w := range r.Rows {
		if w.PagesWritten > 0 {
			n += w.PageFaults
		}
	}
	return n
}

// write puts the report into an open file.
func (r *report) write(f *os.File) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	// What is no regular file (a pipe, /dev/stdout) has nothing to cut off.
	_ = f.Truncate(0)
	_, err = f.Write(append(b, '\n'))
	return errors.Join(err, f.Close())
}
