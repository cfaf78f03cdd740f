// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"cmp"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

// SnapshotVersion is that of Snapshot. Fields may be added without a new one.
const SnapshotVersion = 1

// Snapshot is what a device has and does, at one moment, for people who look.
type Snapshot struct {
	Version int       `json:"version"`
	Time    time.Time `json:"time"`
	PID     int       `json:"pid"`
	Program string    `json:"program"`
	Port    string    `json:"port"`
	State   string    `json:"state"`
	MAC     string    `json:"mac"`
	MTU     int       `json:"mtu"` // of paths, in bytes
	GIDs    []string  `json:"gids"`
	// Paging is empty if userfaultfd is to be had, else what is missing.
	Paging string `json:"paging,omitempty"`
	// Refused are the kinds of super-frames that the kernel has refused: uso4, uso6.
	Refused string `json:"refused,omitempty"`
	// Single are destinations that are given single frames, as super-frames get lost.
	Single []string `json:"single,omitempty"`
	// Counters are those of PublishedFiles, and of the device's own.
	Counters map[string]uint64 `json:"counters"`
	// Memory is that of all regions of the process, also those of other devices.
	Memory mr.Usage `json:"memory"`
	// Threads are those of the program that have waited for pages, longest first.
	Threads []mr.ThreadFaults `json:"threads,omitempty"`
	QPs     []SnapshotQP      `json:"qps"`     // by number, the first of them
	Regions []SnapshotRegion  `json:"regions"` // the longest
	// How many there are in all.
	NumQPs     int `json:"num_qps"`
	NumRegions int `json:"num_regions"`
}

// SnapshotQP is a queue pair.
type SnapshotQP struct {
	Num      uint32      `json:"num"`
	Type     string      `json:"type"`
	State    string      `json:"state"`
	Peer     string      `json:"peer,omitempty"` // its address; none for datagrams
	PeerQP   uint32      `json:"peer_qp,omitempty"`
	Progress qp.Progress `json:"progress"`
}

// SnapshotRegion is a memory region.
type SnapshotRegion struct {
	Key       uint32         `json:"key"`
	Addr      uint64         `json:"addr"`
	Length    uint64         `json:"length"`
	Access    mr.Access      `json:"access"` // enum ibv_access_flags
	Paging    string         `json:"paging"`
	Suspended bool           `json:"suspended"`
	Policy    string         `json:"policy"` // fault policy
	Usage     mr.Usage       `json:"usage"`
	Map       []mr.Residency `json:"map,omitempty"`
}

// Bounds of a Snapshot.
const (
	maxSnapshotQPs     = 1024
	maxSnapshotRegions = 256
	maxSnapshotParts   = 1024  // of a region
	maxAllParts        = 16384 // of all regions, or one of each
)

// Snapshot tells what the device has and does; regions are divided into so many parts, each
// with its own Residency; none with 0, and fewer than asked for if there are many regions. It takes some milliseconds for each
// GiB of regions. A device that is gone can be asked, too; ErrClosed if it was closed.
func (d *Device) Snapshot(parts int) (*Snapshot, error) {
	if d.closed.Load() {
		return nil, ErrClosed
	}
	port := d.QueryPort()
	sn := &Snapshot{
		Version: SnapshotVersion, Time: time.Now().Round(time.Millisecond), PID: os.Getpid(), Program: programName(),
		Port: d.Name(), State: port.State.String(), MAC: d.MAC().String(), MTU: d.mtu.Bytes(), Counters: map[string]uint64{},
	}
	for _, g := range d.GIDs() {
		sn.GIDs = append(sn.GIDs, g.GID.String())
	}
	if err := d.space.UserFault(); err != nil {
		sn.Paging = err.Error()
	}
	if off := d.refusedOffloads(); off != 0 {
		sn.Refused = off.String()
	}
	d.mu.Lock()
	if d.closed.Load() {
		d.mu.Unlock()
		return nil, ErrClosed
	}
	regions := make([]*mr.Region, 0, len(d.mrs))
	for m := range d.mrs {
		regions = append(regions, m.region.Load())
	}
	qps := make([]*QP, 0, len(d.qps))
	for q := range d.qps {
		if q.target == nil { // handles of XRC targets are not QPs of their own
			qps = append(qps, q)
		}
	}
	d.mu.Unlock()
	sn.NumRegions, sn.NumQPs = len(regions), len(qps)
	d.snapQPs(sn, qps)
	d.snapCounters(sn)
	d.snapSingles(sn)

	slices.SortFunc(regions, func(a, b *mr.Region) int {
		return cmp.Or(cmp.Compare(b.Length(), a.Length()), cmp.Compare(a.Addr(), b.Addr()), cmp.Compare(a.LKey(), b.LKey()))
	})
	regions = regions[:min(len(regions), maxSnapshotRegions)]
	parts = min(parts, maxSnapshotParts, max(maxAllParts/max(len(regions), 1), 1))
	for _, r := range regions {
		u, err := r.Usage()
		if err != nil {
			continue // it was deregistered meanwhile
		}
		sn.Regions = append(sn.Regions, SnapshotRegion{
			Key: uint32(r.LKey()), Addr: uint64(r.Addr()), Length: r.Length(), Access: r.Access(), Paging: r.Paging().String(),
			Suspended: r.Suspended(), Policy: r.FaultPolicy().String(), Usage: u, Map: r.Map(parts),
		})
	}
	var err error
	sn.Threads = d.space.FaultThreads()
	sn.Memory, err = d.space.Usage()
	return sn, err
}

// snapBatch is how many QPs are looked at before the engine gets its turn.
const snapBatch = 32

// snapQPs looks at QPs, those with the lowest numbers if there are many. Names are
// made when the engine has its baton back.
func (d *Device) snapQPs(sn *Snapshot, qps []*QP) {
	// One shard's after the other's: the generation does not count.
	slices.SortFunc(qps, func(a, b *QP) int { return cmp.Or(cmp.Compare(a.s.id, b.s.id), cmp.Compare(a.num, b.num)) })
	qps = qps[:min(len(qps), maxSnapshotQPs)]
	var raw [snapBatch]struct {
		gone     bool
		progress qp.Progress
		peer     wire.Path
		peerQP   wire.QPN
	}
	for len(qps) > 0 {
		batch := qps[:min(len(qps), snapBatch)]
		qps = qps[len(batch):]
		var s *shard // of the QP in hand
		for i, q := range batch {
			if q.s != s {
				if s != nil {
					s.release()
				}
				s = q.s
				s.lock()
			}
			r := &raw[i]
			if r.gone = q.gone; !r.gone {
				r.progress, r.peer, r.peerQP = q.q.Progress(), *q.q.Peer(), q.q.DestQPN()
			}
		}
		s.release()
		for i, q := range batch {
			r := &raw[i]
			if r.gone {
				continue
			}
			s := SnapshotQP{Num: uint32(q.num), Type: q.init.Type.String(), State: q.q.State().String(), Progress: r.progress}
			if r.peer.Dst.IsValid() {
				s.Peer, s.PeerQP = r.peer.Dst.String(), uint32(r.peerQP)
			}
			sn.QPs = append(sn.QPs, s)
		}
	}
}

func (d *Device) snapCounters(sn *Snapshot) {
	sums := make([]uint64, numPublished())
	d.published(sums)
	for i, v := range sums {
		if v != 0 {
			_, path := counter(i)
			sn.Counters[filepath.Base(path)] = v
		}
	}
	st, pr := d.Stats(), d.Protocol()
	for name, v := range map[string]uint64{
		"rx_frames": st.RxFrames, "rx_bytes": st.RxBytes, "tx_frames": st.TxFrames, "tx_bytes": st.TxBytes,
		"rcvd_payload_bytes": pr.RcvdBytes.Load(), "sent_payload_bytes": pr.SentBytes.Load(),
		"retransmitted_pkts": pr.RetransmittedPkts.Load(), "probes": pr.Probes.Load(), "cnps": st.CNPs, "cnps_sent": st.CNPsSent,
		"timeouts": st.Timeouts, "wakeups": st.Wakeups, "dropped": st.Dropped(),
	} {
		if v != 0 {
			sn.Counters[name] = v
		}
	}
}

// maxSnapshotSingles bounds Snapshot.Single.
const maxSnapshotSingles = 32

func (d *Device) snapSingles(sn *Snapshot) {
	var to []netip.Addr
	for _, s := range d.shards {
		s.lock()
		to = s.eg.singles(to)
		s.release()
	}
	slices.SortFunc(to, netip.Addr.Compare)
	for _, a := range to[:min(len(to), maxSnapshotSingles)] {
		sn.Single = append(sn.Single, a.String())
	}
}

// programName is the name of this process's executable.
func programName() string {
	exe, err := os.Executable()
	if err != nil {
		return ""
	}
	return filepath.Base(exe)
}
