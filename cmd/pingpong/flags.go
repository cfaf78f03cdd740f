// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
)

// defaultPort is the TCP port of the out-of-band exchange (ibv_rc_pingpong(1), -p).
const defaultPort = 18515

// maxSize bounds -size in bytes. A message may be 2 GiB, but each end holds a
// pattern, a landing region and a source of that size.
const maxSize = 256 << 20

// options is what the command line says.
type options struct {
	listen, connect string
	port            string
	addrs           []netip.Prefix
	gateways        []netip.Addr
	gid             int // -1: not given
	frames          string
	queues          int
	plan            plan
	ops             []op     // nil: not given
	mems            []memory // nil: not given
	paging          string
	events          bool
	json            string
	// The lists as they were given, for the demo's children.
	opList, memList, sizeList string
	sizeGiven, mtuGiven       bool // else ibv_rc_pingpong's defaults hold with one
}

const usageHead = `pingpong moves data between two RDMA queue pairs over TAP devices, verifies every
byte and prints latency and bandwidth.

  pingpong [flags]                      the demo: a private fabric, a server and a client
  pingpong -listen ADDR  -port TAP -addr CIDR [flags]     one end by hand: the server
  pingpong -connect ADDR -port TAP -addr CIDR [flags]     and the client, which drives the tests

The two ends find each other over TCP, by the exchange that rdma-core's
ibv_rc_pingpong uses; either end may be that program (give it -g and the same
-s, -n and -m): then -iters SENDs of -size bytes go each way.

Flags:
`

// errUsage is an error of the command line.
type errUsage struct{ error }

// parseFlags reads the command line. flag.ErrHelp means that help was printed.
func parseFlags(args []string, out io.Writer) (*options, error) {
	o := &options{gid: -1}
	var mtu int
	fs := flag.NewFlagSet("pingpong", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.StringVar(&o.listen, "listen", "", "be the server: wait for a client at this TCP `address`, [host][:port]; port 18515 if none is given")
	fs.StringVar(&o.connect, "connect", "", "be the client: connect to the server at this TCP `address`, host[:port]")
	fs.StringVar(&o.port, "port", "", "`name` of the TAP device to use; it is made if it does not exist and the privileges suffice")
	fs.Func("addr", "`address/length` of this end on the fabric, IPv4 or IPv6; may be given several times", func(s string) error {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return errors.New("want an address and a prefix length, such as 10.77.0.5/24")
		}
		o.addrs = append(o.addrs, p)
		return nil
	})
	fs.Func("gateway", "`address` of the router for peers that are on no -addr's network; may be given for IPv4 and IPv6", func(s string) error {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return errors.New("want an IP address")
		}
		o.gateways = append(o.gateways, a)
		return nil
	})
	fs.Func("gid", "`index` of the source GID: 0 is the link-local one, then each -addr in turn (default 1, or 0 without -addr)", func(s string) (err error) {
		if o.gid, err = strconv.Atoi(s); err != nil || o.gid < 0 {
			return errors.New("want a number from 0 on")
		}
		return nil
	})
	o.frames = "super"
	fs.Func("frames", "`kind` of frames: super (of many packets, where the kernel has them), single, or plain\n(single, without a vnet header) (default super)", func(s string) error {
		o.frames = s
		return new(provider.Config).SetFrames(s)
	})
	fs.IntVar(&o.queues, "queues", 1, "queues of the TAP to use, with an engine each: 1, 2, 4, 8 or 16; queue pairs are spread over them")
	fs.StringVar(&o.opList, "op", "", "`list` of operations: send, write, write-imm, read, atomic, or all (default all)")
	fs.StringVar(&o.memList, "mr", "", "`list` of memory to land in: resident (touched before), cold (never touched before),\npinned (mlock'ed), evicting (more than its -budget: pages leave and come back),\nsuspending (see -suspend)\n(default resident, and cold and pinned too for write; with -op resident alone)")
	fs.StringVar(&o.sizeList, "size", "", "`list` of message sizes in bytes; K and M are KiB and MiB (default 8 to 1M; 4K with a foreign peer);\natomics always move 8")
	fs.IntVar(&o.plan.Iters, "iters", 0, "messages per measurement; 0 is as many as fit a quarter of a second, and at least 256 MiB\nfor the bandwidth of cold memory (default 0; 1000 with a foreign peer)")
	fs.IntVar(&o.plan.Depth, "depth", 64, "work requests in flight per QP when bandwidth is measured")
	fs.IntVar(&o.plan.QPs, "qp", 1, "queue pairs to spread the messages over, round robin")
	fs.IntVar(&mtu, "mtu", 0, "path MTU: 256, 512, 1024, 2048 or 4096 bytes of payload per packet\n(default 4096; 1024 with a foreign peer)")
	fs.Uint64Var(&o.plan.Seed, "seed", 1, "seed of the data that is sent")
	fs.IntVar(&o.plan.Budget, "budget", 25, "`percent` of evicting memory that may be resident; what is beyond is evicted")
	o.plan.Suspend = rhythm{time.Millisecond, 10 * time.Millisecond}
	fs.Func("suspend", "`FOR/EVERY`: suspending memory is suspended for FOR in each EVERY (default 1ms/10ms)", o.plan.Suspend.set)
	fs.BoolVar(&o.events, "events", false, "sleep on completion channels instead of polling (WRITE latency still polls memory)")
	fs.StringVar(&o.paging, "paging", "userfault", "who brings absent pages in: userfault (this program) or kernel (ordinary paging)")
	fs.StringVar(&o.json, "json", "", "also write everything that is printed to this `file`, as JSON")
	err := fs.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprint(out, usageHead)
		fs.SetOutput(out)
		fs.PrintDefaults()
		return nil, flag.ErrHelp
	}
	if err != nil {
		return nil, errUsage{err}
	}
	if fs.NArg() > 0 {
		return nil, errUsage{fmt.Errorf("unexpected argument %q (every option has a name: see -h)", fs.Arg(0))}
	}
	fs.Visit(func(f *flag.Flag) {
		switch f.Name {
		case "size":
			o.sizeGiven = true
		case "mtu":
			o.mtuGiven = true
		}
	})
	if !o.mtuGiven {
		mtu = qp.MTU4096.Bytes()
	}
	if err := o.check(mtu); err != nil {
		return nil, errUsage{err}
	}
	return o, nil
}

// byHand says whether this process is one end, not the demo.
func (o *options) byHand() bool { return o.listen != "" || o.connect != "" }

// check turns the lists into values and refuses what does not go together.
func (o *options) check(mtu int) error {
	var err error
	if o.ops, err = parseList[op]("-op", o.opList, opNames[:]); err != nil {
		return err
	}
	if o.mems, err = parseList[memory]("-mr", o.memList, memoryNames[:]); err != nil {
		return err
	}
	if o.plan.Sizes, err = parseSizes(o.sizeList); err != nil {
		return err
	}
	m, ok := qp.MTUOf(mtu)
	if !ok {
		return fmt.Errorf("-mtu %d: want 256, 512, 1024, 2048 or 4096", mtu)
	}
	o.plan.MTU = m
	o.plan.Events = o.events
	byHand := o.byHand()
	switch {
	case o.listen != "" && o.connect != "":
		return errors.New("-listen and -connect exclude each other")
	case o.plan.Iters < 0 || o.plan.Iters > 1<<30:
		return fmt.Errorf("-iters %d: want 0 to %d", o.plan.Iters, 1<<30)
	case o.plan.Depth < 1 || o.plan.Depth > 4096:
		return fmt.Errorf("-depth %d: want 1 to 4096", o.plan.Depth)
	case o.plan.QPs < 1 || o.plan.QPs > 256:
		return fmt.Errorf("-qp %d: want 1 to 256", o.plan.QPs)
	case o.plan.Budget < 1 || o.plan.Budget > 100:
		return fmt.Errorf("-budget %d: want 1 to 100 percent", o.plan.Budget)
	case o.paging == "kernel" && slices.Contains(o.mems, memEvicting):
		return errors.New("evicting memory is paged by userfaultfd: -paging kernel goes with other memory")
	case o.paging != "userfault" && o.paging != "kernel":
		return fmt.Errorf("-paging %q: want userfault or kernel", o.paging)
	case byHand && o.port == "":
		return errors.New("-listen and -connect need -port, the TAP device to use")
	case !byHand && (o.port != "" || len(o.addrs) > 0 || len(o.gateways) > 0 || o.gid >= 0):
		return errors.New("-port, -addr, -gateway and -gid are for -listen and -connect; the demo makes its own fabric")
	case o.gid > len(o.addrs):
		return fmt.Errorf("-gid %d: with %d -addr there are GIDs 0 to %d", o.gid, len(o.addrs), len(o.addrs))
	case o.listen != "" && (o.opList != "" || o.memList != ""):
		return errors.New("-op and -mr are the client's to choose: give them with -connect")
	case o.listen != "" && o.json != "":
		return errors.New("-json is written by the client: give it with -connect")
	}
	if o.gid < 0 {
		o.gid = min(1, len(o.addrs))
	}
	return nil
}

// parseList reads a comma-separated list of names; nil when s is empty, all of
// them for "all". Each name may occur once.
func parseList[T ~uint8](what, s string, names []string) ([]T, error) {
	if s == "" {
		return nil, nil
	}
	var out []T
	for _, w := range strings.Split(s, ",") {
		if w == "all" && s == "all" {
			for i := range names {
				out = append(out, T(i))
			}
			return out, nil
		}
		i := slices.Index(names, w)
		if i < 0 {
			return nil, fmt.Errorf("%s %q: want some of %s, or all", what, w, strings.Join(names, ", "))
		}
		if slices.Contains(out, T(i)) {
			return nil, fmt.Errorf("%s names %s twice", what, w)
		}
		out = append(out, T(i))
	}
	return out, nil
}

// defaultSizes are the sizes in bytes that are measured when -size says nothing.
var defaultSizes = [...]int{8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20}

// parseSizes reads a comma-separated list of byte counts.
func parseSizes(s string) ([]int, error) {
	if s == "" {
		return defaultSizes[:], nil
	}
	var out []int
	for _, w := range strings.Split(s, ",") {
		num, shift := w, 0
		switch {
		case strings.HasSuffix(w, "K"):
			num, shift = w[:len(w)-1], 10
		case strings.HasSuffix(w, "M"):
			num, shift = w[:len(w)-1], 20
		}
		n, err := strconv.Atoi(num)
		if err != nil || n < 1 || n > maxSize>>shift {
			return nil, fmt.Errorf("-size %q: want bytes from 1 to 256M, such as 8, 4096, 64K or 1M", w)
		}
		out = append(out, n<<shift)
	}
	return out, nil
}

// tcpAddr adds the default port to an address that has none.
func tcpAddr(s string) string {
	if _, _, err := net.SplitHostPort(s); err == nil {
		return s
	}
	return net.JoinHostPort(strings.Trim(s, "[]"), strconv.Itoa(defaultPort))
}
