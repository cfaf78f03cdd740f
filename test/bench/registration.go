// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/tap/taptest"
)

// Registration: how long it takes to make a region of so many bytes and to end it, by
// way of who holds the memory.

// regSizes are the lengths in bytes: 4 KiB to 4 GiB.
var regSizes = []uint64{4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30, 4 << 30}

// regWays are the ways, in the order of the table.
var regWays = [...]string{"on demand", "mlock", "io_uring"}

// regTime is the median of some registrations of one length.
type regTime struct {
	Size       uint64
	Touched    bool // memory that is resident before
	Reg, Dereg [len(regWays)]time.Duration
}

// pinner registers memory and gives a function that ends that.
type pinner func(addr uintptr, n uint64) (end func() error, err error)

// registrations measures all of it, each some times.
func registrations(runs int) (out []regTime, err error) {
	// Those with CAP_IPC_LOCK need no limit lifted, and others hear of it from mlock.
	_ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY})
	ways, stop, err := pinners()
	if err != nil {
		return nil, err
	}
	defer stop()
	for _, touched := range []bool{false, true} {
		for _, n := range regSizes {
			r := regTime{Size: n, Touched: touched}
			for w, pin := range ways {
				// What takes long needs no average.
				many := runs * int(max(1, min(20, (64<<20)/n)))
				if w == 0 {
					many = runs * 20
				}
				if r.Reg[w], r.Dereg[w], err = regMedian(pin, n, touched, many); err != nil {
					return nil, fmt.Errorf("%s, %s: %w", regWays[w], sizeString(n), err)
				}
			}
			fmt.Fprintf(os.Stderr, "%s: %v %v\n", sizeString(n), r.Reg, r.Dereg)
			out = append(out, r)
		}
	}
	return out, nil
}

// pinners are the ways. On demand and mlock go through RegMR of a device.
func pinners() (ways [len(regWays)]pinner, stop func(), err error) {
	net := taptest.New(nil, taptest.Config{})
	dev, err := provider.Open(provider.Config{Device: net.Port(0), Addrs: []netip.Prefix{netip.MustParsePrefix("10.91.0.1/24")}})
	if err != nil {
		return ways, nil, err
	}
	if err := dev.Space().UserFault(); err != nil {
		return ways, nil, err
	}
	pd, err := dev.AllocPD()
	if err != nil {
		return ways, nil, err
	}
	ring, err := newUring()
	if err != nil {
		return ways, nil, err
	}
	reg := func(pin bool) pinner {
		return func(addr uintptr, n uint64) (func() error, error) {
			m, err := pd.Register(provider.MRAttr{Addr: addr, Length: n, Access: allRights, Pin: pin})
			if err != nil {
				return nil, err
			}
			return m.Dereg, nil
		}
	}
	ways = [...]pinner{reg(false), reg(true), func(addr uintptr, n uint64) (func() error, error) { return ring.unpin, ring.pin(addr, n) }}
	// What is left when the process ends is given back then.
	return ways, func() { _, _ = ring.close(), dev.Close() }, nil
}

// regMedian registers new memory so many times.
func regMedian(pin pinner, n uint64, touched bool, times int) (reg, dereg time.Duration, err error) {
	var regs, deregs []time.Duration
	var mem *mr.Memory
	fresh := func() (err error) {
		if mem, err = mr.Alloc(int(n)); err == nil && touched {
			err = unix.Madvise(mem.Bytes(), unix.MADV_POPULATE_WRITE)
		}
		return err
	}
	for i := range times {
		// Memory that was pinned once has been touched: it has to be new each time.
		if i == 0 || !touched {
			if err := fresh(); err != nil {
				return 0, 0, err
			}
		}
		t0 := time.Now()
		end, err := pin(mem.Addr(), n)
		t1 := time.Now()
		if err != nil {
			return 0, 0, err
		}
		if err := end(); err != nil {
			return 0, 0, err
		}
		regs, deregs = append(regs, t1.Sub(t0)), append(deregs, time.Since(t1))
		if i == times-1 || !touched {
			if err := mem.Close(); err != nil {
				return 0, 0, err
			}
		}
	}
	slices.Sort(regs)
	slices.Sort(deregs)
	return regs[len(regs)/2], deregs[len(deregs)/2], nil
}

// printRegistrations prints a table for untouched and one for resident memory.
func printRegistrations(w io.Writer, rs []regTime) {
	for _, touched := range []bool{false, true} {
		what := "memory never touched"
		if touched {
			what = "resident memory"
		}
		fmt.Fprintf(w, "\n| %s | on demand: reg, µs | dereg, µs | mlock: reg, µs | dereg, µs | io_uring: reg, µs | dereg, µs |\n|---:|---:|---:|---:|---:|---:|---:|\n", what)
		for _, r := range rs {
			if r.Touched != touched {
				continue
			}
			fmt.Fprintf(w, "| %s |", sizeString(r.Size))
			for i := range regWays {
				fmt.Fprintf(w, " %s | %s |", micros(r.Reg[i]), micros(r.Dereg[i]))
			}
			fmt.Fprintln(w)
		}
	}
}

// plotRegistrations draws registering and deregistering memory never touched.
func plotRegistrations(dir string, rs []regTime) error {
	var cs []curve
	var ts []tick
	for _, n := range regSizes {
		ts = append(ts, tick{float64(n), sizeString(n)})
	}
	for i, name := range regWays {
		c := curve{name: name}
		for _, r := range rs {
			if !r.Touched {
				c.at = append(c.at, point{float64(r.Size), float64(r.Reg[i]+r.Dereg[i]) / 1e3})
			}
		}
		cs = append(cs, c)
	}
	return draw(dir, "registration", picture{
		title: "Registering and deregistering memory never touched", y: "µs", logX: true, logY: true, ticks: ts, curves: cs})
}
