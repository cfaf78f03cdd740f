// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/internal/stats"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/wire"
)

// The raw device: frames as an engine's, through TAPs on a bridge, between two processes,
// with nothing done but to write and read them. Super-frames are taken apart where they arrive, as an
// engine would, and not looked at.

const (
	batch = 64
	// window is how many packets the writer is ahead of the reader at most, and windowFrames how
	// many frames they may be: half of what the TAP holds. The reader says every creditEvery
	// packets where it is, so that nothing is lost to a full queue.
	window       = 4096
	windowFrames = queueLen / 2
	creditEvery  = 128
	rateTime     = 400 * time.Millisecond
	roundTrips   = 10000
	// patience is how long a frame may stay away before the run has failed.
	patience = 5 * time.Second
	// rawPort is the TCP port of the reader.
	rawPort = 18600
)

// The kinds of frames.
const (
	kindPlain = "plain" // without a vnet header
	kindVnet  = "vnet"  // with one
	kindSuper = "super" // with one, as many packets to a frame as it holds
)

// job is what is measured.
type job struct {
	Kind    string
	Payload int  // bytes behind the BTH, of one packet
	Echo    bool // round trips: each frame is answered, not every creditEvery-th
}

// rawJobs are all that is measured.
var rawJobs = []job{
	{kindPlain, 4096, false},
	{kindVnet, 8, false}, {kindVnet, 64, false}, {kindVnet, 512, false}, {kindVnet, 4096, false},
	{kindSuper, 8, false}, {kindSuper, 64, false}, {kindSuper, 512, false}, {kindSuper, 4096, false},
	{kindVnet, 8, true}, {kindVnet, 64, true}, {kindVnet, 512, true}, {kindVnet, 4096, true}, {kindPlain, 8, true},
}

// rawResult is what came of a job.
type rawResult struct {
	Rate float64      // packets a second
	CPU  float64      // seconds of both ends for a GiB of payload
	All  float64      // the same of all that the machine did
	Half stats.Micros // of half round trips
}

// rawEnd is "end raw-reader PORT JOB" and "end raw-writer PORT JOB", by the job's place in rawJobs.
func rawEnd(role, port, which string) error {
	n, err := strconv.Atoi(which)
	if err != nil || n < 0 || n >= len(rawJobs) {
		return fmt.Errorf("no raw job %q", which)
	}
	if role == "raw-reader" {
		err = rawJobs[n].reader(port)
	} else {
		err = rawJobs[n].writer(port)
	}
	if err != nil {
		return fmt.Errorf("raw frames, %+v: %w", rawJobs[n], err)
	}
	return nil
}

// rawPart measures all of it; each job has processes of its own, so that one that fails
// leaves the others alone.
func rawPart(r *room, b *book) error {
	for i, j := range rawJobs {
		who, what := "raw "+j.Kind, "frames"
		if j.Echo {
			what = "ping-pong"
		}
		b.try("raw", key{Who: who, What: what, X: j.Payload}, r.raw(b, i, who, what))
	}
	return nil
}

func (r *room) raw(b *book, i int, who, what string) error {
	end := func(role string, port int) command {
		return command{at: r.here, args: []string{r.self, "end", role, r.ports[port].Name, strconv.Itoa(i)}}
	}
	o, err := pair(end("raw-reader", 0), end("raw-writer", 1), rawPort)
	if err != nil {
		return err
	}
	var got rawResult
	if err := json.Unmarshal([]byte(o.client), &got); err != nil {
		return fmt.Errorf("the raw writer printed %q (%w)", o.client, err)
	}
	j := rawJobs[i]
	if j.Echo {
		addMicros(b, who, what, j.Payload, got.Half)
		return nil
	}
	b.add(who, what, j.Payload, rate, got.Rate)
	b.add(who, what, j.Payload, gbps, got.Rate*float64(j.Payload)*8/1e9)
	b.add(who, what, j.Payload, cpuGiB, got.CPU)
	b.add(who, what, j.Payload, allGiB, got.All)
	return nil
}

func addMicros(b *book, who, what string, x int, m stats.Micros) {
	b.add(who, what, x, p50, m.P50)
	b.add(who, what, x, p99, m.P99)
	b.add(who, what, x, p999, m.P999)
}

// frame makes the frame of a packet with so many bytes, from port from, the i-th of a
// super-frame.
func frame(from, payload, i int) []byte {
	mac := func(i int) [6]byte { return [6]byte{2, 't', 'v', 0, 0, byte(i + 1)} }
	addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 91, 0, byte(i + 1)}) }
	p := wire.Path{SrcMAC: mac(from), DstMAC: mac(1 - from), Src: addr(from), Dst: addr(1 - from), SrcPort: 0xc000, HopLimit: 64}
	b := make([]byte, p.FrameLen(wire.RCSendMiddle, payload))
	wire.Encode(b, &p, uint16(1+i), &wire.BTH{Op: wire.RCSendMiddle, PKey: wire.DefaultPKey, DestQP: 17, PSN: wire.PSN(1 + i)}, nil, make([]byte, payload))
	return b
}

// frames are a batch, and how many packets each is.
func (j job) frames(from int) (fs []tap.Frame, packets int) {
	if j.Kind != kindSuper {
		fs = make([]tap.Frame, batch)
		for i := range fs {
			fs[i].B = frame(from, j.Payload, 0)
		}
		return fs, 1
	}
	first := frame(from, j.Payload, 0)
	h := wire.RoCE(first)
	l := len(first) - h
	packets = min((wire.MaxSuper-h)/l, tap.MaxSegments)
	// Headers in front, and the packets as pieces behind: so an engine sends its memory.
	f := tap.Frame{B: make([]byte, h), GSO: uint16(l)}
	for i := range packets {
		f.More = append(f.More, frame(from, j.Payload, i)[h:])
	}
	wire.PutSuper(f.B, first, packets*l)
	fs = make([]tap.Frame, max(1, batch/packets))
	for i := range fs {
		fs[i] = f
	}
	return fs, packets
}

func (j job) open(port string) (tap.Device, error) {
	d, err := tap.Open(tap.Config{Name: port, Plain: j.Kind == kindPlain})
	if err == nil && j.Kind == kindSuper && !d.Offloads().Has(tap.USO4) {
		d.Close()
		return nil, errors.New("the kernel knows no UDP segmentation offload (Linux 6.2)")
	}
	return d, err
}

func (j job) buffers() []tap.Frame {
	n, size := batch, fabric.DefaultMTU+tap.EthHeaderLen+tap.VLANTagLen
	if j.Kind == kindSuper {
		n, size = 16, tap.MaxFrame
	}
	fs := make([]tap.Frame, n)
	for i := range fs {
		fs[i].B = make([]byte, size)
	}
	return fs
}

// count is how many packets were read; super-frames are taken apart.
func count(in []tap.Frame) (n int, err error) {
	for i := range in {
		if in[i].GSO == 0 {
			n++
			continue
		}
		var s wire.Super
		if err := s.Open(in[i].B, int(in[i].GSO)); err != nil {
			return n, err
		}
		for s.Next() != nil {
			n++
		}
	}
	return n, nil
}

// read reads at least one frame, spinning, and gives how many.
func read(d tap.Device, in []tap.Frame, stop func() bool) (int, error) {
	var since time.Time
	for spins := 1; ; spins++ {
		n, err := d.ReadBatch(in)
		if n > 0 || err != nil {
			return n, err
		}
		if spins%1024 == 0 {
			switch now := time.Now(); {
			case stop != nil && stop():
				return 0, nil
			case since.IsZero():
				since = now
			case now.Sub(since) > patience:
				return 0, errors.New("a frame got lost")
			}
		}
	}
}

// write writes frames, all of them.
func write(d tap.Device, out []tap.Frame) error {
	for len(out) > 0 {
		n, err := d.WriteBatch(out)
		if err != nil {
			return err
		}
		out = out[n:]
	}
	return nil
}

// reader does its part of the job.
func (j job) reader(port string) error {
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", rawPort))
	if err != nil {
		return err
	}
	conn, err := l.Accept()
	if err != nil {
		return err
	}
	return j.read(port, conn)
}

func (j job) read(port string, conn net.Conn) error {
	d, err := j.open(port)
	if err != nil {
		return err
	}
	defer d.Close()
	credit := job{Kind: kindVnet, Payload: 8}
	every := creditEvery
	if j.Echo {
		credit.Payload, every = j.Payload, 1
	}
	answer, _ := credit.frames(0)
	if _, err := conn.Write([]byte("ready\n")); err != nil {
		return err
	}
	before, err := processorTime()
	if err != nil {
		return err
	}
	over := make(chan struct{})
	go func() {
		_, _ = conn.Read(make([]byte, 8)) // "over", or the end of the connection: the same
		close(over)
	}()
	stop := func() bool {
		select {
		case <-over:
			return true
		default:
			return false
		}
	}
	bufs := j.buffers()
	for got, answered := 0, 0; ; {
		n, err := read(d, bufs, stop)
		if err != nil {
			return err
		}
		if n == 0 {
			<-over
			now, err := processorTime()
			if err == nil {
				_, err = fmt.Fprintf(conn, "done %d\n", now-before)
			}
			return err
		}
		k, err := count(bufs[:n])
		if err != nil {
			return err
		}
		for got += k; got-answered >= every; answered += every {
			if err := write(d, answer[:1]); err != nil {
				return err
			}
		}
	}
}

// writer does the rest of the job and prints what came of it as JSON.
func (j job) writer(port string) error {
	conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", rawPort))
	if err != nil {
		return err
	}
	defer conn.Close()
	var out rawResult
	if err := j.write(port, conn, bufio.NewReader(conn), &out); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(out)
}

// write opens the port and measures while the reader does its part.
func (j job) write(port string, conn net.Conn, in *bufio.Reader, r *rawResult) error {
	d, err := j.open(port)
	if err != nil {
		return err
	}
	defer d.Close()
	if _, err := hear(in, "ready"); err != nil {
		return err
	}
	if j.Echo {
		if r.Half, err = j.trips(d); err == nil {
			_, err = say(conn, in, "over", "done")
		}
		return err
	}
	before, err := processorTime()
	if err != nil {
		return err
	}
	was := busy()
	var packets int
	if packets, r.Rate, err = j.rate(d); err != nil {
		return err
	}
	all := busy() - was
	mine, err := processorTime()
	if err != nil {
		return err
	}
	word, err := say(conn, in, "over", "done")
	if err != nil {
		return err
	}
	theirs, err := strconv.ParseInt(word, 10, 64)
	gib := float64(packets*j.Payload) / (1 << 30)
	r.CPU, r.All = (mine-before+time.Duration(theirs)).Seconds()/gib, all/gib
	return err
}

// say tells the reader something and hears what it answers.
func say(conn net.Conn, in *bufio.Reader, what, want string) (string, error) {
	if _, err := conn.Write([]byte(what + "\n")); err != nil {
		return "", err
	}
	return hear(in, want)
}

// hear gives what follows the word that the reader's line shall begin with.
func hear(in *bufio.Reader, want string) (string, error) {
	line, err := in.ReadString('\n')
	word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
	if err != nil || word != want {
		return "", fmt.Errorf("the reader says %q (%v)", line, err)
	}
	return rest, nil
}

// rate writes frames for rateTime and gives how many packets arrived, and how many a second.
func (j job) rate(d tap.Device) (int, float64, error) {
	out, packets := j.frames(1)
	in := job{Kind: kindVnet}.buffers()
	fds := []unix.PollFd{{Fd: int32(d.FD()), Events: unix.POLLIN}}
	sent, credited, most := 0, 0, min(window, windowFrames*packets)
	start := time.Now()
	for time.Since(start) < rateTime || sent-credited >= creditEvery {
		n, err := d.ReadBatch(in)
		if err != nil {
			return 0, 0, err
		}
		credited += n * creditEvery
		switch {
		case n > 0:
		case time.Since(start) >= rateTime || sent-credited > most-packets*len(out):
			// Sleeping until the reader has caught up gives it the processor.
			if n, err := unix.Poll(fds, int(patience.Milliseconds())); n == 0 && err == nil {
				return 0, 0, fmt.Errorf("frames got lost: %d sent, %d taken", sent, credited)
			}
		default:
			if err := write(d, out); err != nil {
				return 0, 0, err
			}
			sent += packets * len(out)
		}
	}
	return credited, float64(credited) / time.Since(start).Seconds(), nil
}

// trips sends one frame and waits for the answer, many times.
func (j job) trips(d tap.Device) (stats.Micros, error) {
	out, _ := j.frames(1)
	in := j.buffers()
	h := stats.NewLatency()
	last := time.Now()
	for range roundTrips {
		if err := write(d, out[:1]); err != nil {
			return stats.Micros{}, err
		}
		if _, err := read(d, in, nil); err != nil {
			return stats.Micros{}, err
		}
		now := time.Now()
		h.Add(int64(now.Sub(last)) / 2)
		last = now
	}
	return h.Micros(), nil
}
