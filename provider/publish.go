// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// publishEvery is how often the files are written, while something changes: what they say is twice as old at most.
const publishEvery = 100 * time.Millisecond

// published is a counter that the device keeps in a file. Names and meanings are those
// of the kernel: Documentation/ABI/stable/sysfs-class-infiniband for counters, and
// rdma_rxe for hw_counters, and mlx5 for those of congestion. What no driver has, tells of
// super-frames, single_fallbacks and super_refused, and of what receivers say, windows_heard and
// windows_told.
type published struct {
	name string
	of   func(s *shard) uint64 // called with the baton
}

func never(*shard) uint64 { return 0 }

// portCounters are those of ports/1/counters. Data is counted in words of 4 bytes, with
// all headers. What there is no such thing as on an Ethernet port stays 0.
var portCounters = [...]published{
	{"VL15_dropped", never},
	{"excessive_buffer_overrun_errors", never},
	{"link_downed", func(s *shard) uint64 { return s.cnt.LinkDowns }},
	{"link_error_recovery", never},
	{"local_link_integrity_errors", never},
	{"multicast_rcv_packets", func(s *shard) uint64 { return s.cnt.RxGroupPackets }},
	{"multicast_xmit_packets", func(s *shard) uint64 { return s.eg.sentGroup }},
	{"port_rcv_constraint_errors", func(s *shard) uint64 { return s.cnt.Drops[DropPKey] }},
	{"port_rcv_data", func(s *shard) uint64 { return s.cnt.RxPacketBytes / 4 }},
	{"port_rcv_errors", func(s *shard) uint64 {
		d := &s.cnt.Drops
		return d[DropTruncated] + d[DropMalformed] + d[DropChecksum] + d[DropVersion] + d[DropOpcode] + d[DropICRC]
	}},
	{"port_rcv_packets", func(s *shard) uint64 { return s.cnt.RxPackets }},
	{"port_rcv_remote_physical_errors", never},
	{"port_rcv_switch_relay_errors", never},
	{"port_xmit_constraint_errors", never},
	{"port_xmit_data", func(s *shard) uint64 { return s.eg.sentBytes / 4 }},
	{"port_xmit_discards", func(s *shard) uint64 { return s.cnt.TxDropped + s.cnt.TxErrors }},
	{"port_xmit_packets", func(s *shard) uint64 { return s.eg.sent }},
	{"port_xmit_wait", never},
	{"symbol_error", never},
	{"unicast_rcv_packets", func(s *shard) uint64 { return s.cnt.RxPackets - s.cnt.RxGroupPackets }},
	{"unicast_xmit_packets", func(s *shard) uint64 { return s.eg.sent - s.eg.sentGroup }},
}

// hwCounters are those of ports/1/hw_counters. Acknowledgements are dealt with as they
// come, so none is deferred.
var hwCounters = [...]published{
	{"ack_deferred", never},
	{"completer_retry_err", func(s *shard) uint64 {
		return s.stats.LocalAckTimeout.Load() + s.stats.RcvdNakSeq.Load() + s.stats.OutOfSeqResponse.Load()
	}},
	{"duplicate_request", func(s *shard) uint64 { return s.stats.DuplicateRequest.Load() }},
	{"link_downed", func(s *shard) uint64 { return s.cnt.LinkDowns }},
	{"np_cnp_sent", func(s *shard) uint64 { return s.cnt.CNPsSent }},
	{"np_ecn_marked_roce_packets", func(s *shard) uint64 { return s.cnt.Marked }},
	{"out_of_seq_request", func(s *shard) uint64 { return s.stats.OutOfSeqRequest.Load() }},
	{"rcvd_pkts", func(s *shard) uint64 { return s.stats.RcvdPkts.Load() }},
	{"rcvd_rnr_err", func(s *shard) uint64 { return s.stats.RcvdRNRNak.Load() }},
	{"rcvd_seq_err", func(s *shard) uint64 { return s.stats.RcvdNakSeq.Load() }},
	{"rdma_recvs", func(s *shard) uint64 { return s.stats.Recvs.Load() }},
	{"rdma_sends", func(s *shard) uint64 { return s.stats.Sends.Load() }},
	{"retry_exceeded_err", func(s *shard) uint64 { return s.stats.RetryExceeded.Load() }},
	{"retry_rnr_exceeded_err", func(s *shard) uint64 { return s.stats.RNRExceeded.Load() }},
	{"rp_cnp_handled", func(s *shard) uint64 { return s.cnt.CNPsHandled }},
	{"rp_cnp_ignored", func(s *shard) uint64 { return s.cnt.CNPs - s.cnt.CNPsHandled }},
	{"send_err", func(s *shard) uint64 { return s.cnt.TxErrors }},
	{"send_rnr_err", func(s *shard) uint64 { return s.stats.SentRNRNak.Load() }},
	{"sent_pkts", func(s *shard) uint64 { return s.stats.SentPkts.Load() }},
	{"single_fallbacks", func(s *shard) uint64 { return s.cnt.SingleFallbacks }},
	{"super_refused", func(s *shard) uint64 { return s.cnt.SuperRefused }},
	{"windows_heard", func(s *shard) uint64 { return s.cnt.WindowsHeard }},
	{"windows_told", func(s *shard) uint64 { return s.cnt.WindowsTold }},
}

// published adds up what the shards have counted.
func (d *Device) published(sums []uint64) {
	clear(sums)
	for _, s := range d.shards {
		s.lock()
		for i := range sums {
			c, _ := counter(i)
			sums[i] += c.of(s)
		}
		s.release()
	}
}

// tally is what a shard has counted, as of when somebody gave the baton back who was asked for it: the publisher
// waits for nobody, which would have threads wait for it in turn.
type tally struct {
	asked atomic.Bool
	mu    sync.Mutex // guards sums: a leaf
	sums  []uint64
}

// tallyUp is called by the holder of the baton who was asked.
func (s *shard) tallyUp() {
	t := &s.tally
	t.asked.Store(false)
	t.mu.Lock()
	if t.sums == nil {
		t.sums = make([]uint64, numPublished())
	}
	for i := range t.sums {
		c, _ := counter(i)
		t.sums[i] = c.of(s)
	}
	t.mu.Unlock()
}

// tallied adds up what the shards have counted. It says false if somebody is at work in one of them, of whom
// there will be news soon.
func (d *Device) tallied(sums []uint64) (fresh bool) {
	clear(sums)
	fresh = true
	for _, s := range d.shards {
		t := &s.tally
		t.asked.Store(true)
		if s.baton.TryLock() {
			s.release()
		} else {
			fresh = false
		}
		t.mu.Lock()
		for i, v := range t.sums {
			sums[i] += v
		}
		t.mu.Unlock()
	}
	return fresh
}

func numPublished() int { return len(portCounters) + len(hwCounters) }

// counter gives counter i and its path.
func counter(i int) (c *published, path string) {
	if i < len(portCounters) {
		c = &portCounters[i]
		return c, "ports/1/counters/" + c.name
	}
	c = &hwCounters[i-len(portCounters)]
	return c, "ports/1/hw_counters/" + c.name
}

const statePath, physPath = "ports/1/state", "ports/1/phys_state"

// stateFiles is what the two files say of a state.
func stateFiles(st PortState) (state, phys string) {
	if st == PortActive {
		return "4: ACTIVE\n", "5: LinkUp\n"
	}
	return "1: DOWN\n", "3: Disabled\n"
}

// PublishedFiles lists the files that a device keeps up to date in Config.Sysfs, by
// their paths in it, with what they hold before there is a device.
func PublishedFiles() map[string]string {
	m := make(map[string]string, numPublished()+2)
	for i := range numPublished() {
		_, path := counter(i)
		m[path] = "0\n"
	}
	m[statePath], m[physPath] = stateFiles(PortActive)
	return m
}

// publisher keeps the files of Config.Sysfs up to date, from a goroutine of its own: it
// looks every publishEvery while something changes, and sleeps when nothing does. The
// engine rouses it. A file is written in place, so that who has it open reads on.
// Counters go on where the last process that had the port left them.
type publisher struct {
	s    *shard
	root int // descriptor of the directory; -1: there is none
	wake chan struct{}
	quit chan struct{}
	done chan struct{}

	// dozing: the next iteration of a shard that does something rouses the goroutine.
	dozing atomic.Bool

	base, now, last []uint64 // of each counter
	state, said     PortState
}

// start begins to publish in dir. Files that are not there or may not be written are
// left alone: that is no reason to have no device.
func (p *publisher) start(dir string) {
	p.root = -1
	if dir == "" {
		return
	}
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	p.root = fd
	p.base, p.now, p.last = make([]uint64, numPublished()), make([]uint64, numPublished()), make([]uint64, numPublished())
	for i := range p.base {
		_, path := counter(i)
		p.base[i] = p.read(path)
	}
	p.wake, p.quit, p.done = make(chan struct{}, 1), make(chan struct{}), make(chan struct{})
	go p.run()
}

// close writes what there is to write and ends the goroutine.
func (p *publisher) close() {
	if p.done == nil {
		return
	}
	close(p.quit)
	<-p.done
	unix.Close(p.root)
	p.root = -1
}

// rouse is called by the holder of a baton when there is something to publish.
func (p *publisher) rouse() {
	if p.dozing.Load() && p.dozing.Swap(false) {
		select {
		case p.wake <- struct{}{}:
		default: // it is ending
		}
	}
}

func (p *publisher) run() {
	defer close(p.done)
	t := time.NewTimer(publishEvery)
	defer t.Stop()
	for {
		var tick <-chan time.Time
		if p.publish() {
			t.Reset(publishEvery)
			tick = t.C
		}
		select {
		case <-tick:
		case <-p.wake:
		case <-p.quit:
			p.s.d.published(p.now)
			p.write()
			return
		}
	}
}

// publish writes what has changed, and says whether there is more to come.
func (p *publisher) publish() bool {
	p.dozing.Store(true) // before it looks: what changes later is heard of
	fresh := p.s.d.tallied(p.now)
	if !p.write() && fresh {
		return false
	}
	p.dozing.Store(false)
	return true
}

// write writes what has changed, and says whether anything had.
func (p *publisher) write() bool {
	p.state = p.s.portState()
	if slices.Equal(p.now, p.last) && p.state == p.said {
		return false
	}
	var buf [24]byte
	for i, v := range p.now {
		if v != p.last[i] {
			_, path := counter(i)
			p.put(path, append(strconv.AppendUint(buf[:0], p.base[i]+v, 10), '\n'))
		}
	}
	if p.state != p.said {
		state, phys := stateFiles(p.state)
		p.put(statePath, []byte(state))
		p.put(physPath, []byte(phys))
	}
	copy(p.last, p.now)
	p.said = p.state
	return true
}

// put puts b into a file, whose length is that of b then.
func (p *publisher) put(path string, b []byte) {
	fd, err := unix.Openat(p.root, path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	if n, err := unix.Pwrite(fd, b, 0); err == nil {
		_ = unix.Ftruncate(fd, int64(n))
	}
	unix.Close(fd)
}

// read gives the number in a file, 0 if there is none.
func (p *publisher) read(path string) uint64 {
	fd, err := unix.Openat(p.root, path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	var b [24]byte
	n, err := unix.Pread(fd, b[:], 0)
	if err != nil || n < 2 {
		return 0
	}
	v, _ := strconv.ParseUint(string(b[:n-1]), 10, 64)
	return v
}
