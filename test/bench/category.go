// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// What samples of a profiler are about: perf script's text is read, and each sample put into a
// category by where the processor was and how it came there.

// call is where the processor was, or what called that: a function, and the file that it is in.
type call struct{ sym, dso string }

// hit is a sample of perf's.
type hit struct {
	at    float64 // seconds, of the clock that perf was told to use
	ns    float64 // processor time that it stands for
	chain []call  // where the processor was, its caller, and so on
}

// The categories, in the order of the table.
const (
	catReadCopy  = "read(2): copying"
	catRead      = "read(2): the rest"
	catWriteCopy = "write(2): copying"
	catWrite     = "write(2): the rest, with the bridge and the peer's queue"
	catSleep     = "the kernel: sleeping, waking, switching threads"
	catFault     = "the kernel: page faults, memory"
	catKernel    = "the kernel: other calls, interrupts"
	catEntry     = "entry to and exit from system calls"
	catCopy      = "copying data"
	catICRC      = "ICRC"
	catProtocol  = "protocol: parsing, requester, responder, completer"
	catRings     = "rings: posting, completions"
	catPages     = "keys, page states"
	catClock     = "the clock"
	catTAP       = "batches, vnet headers"
	catEngine    = "the engine's loop, egress, timers"
	catRuntime   = "Go's scheduler and runtime, calls from C"
	catProgram   = "the program"
	catOther     = "anything else"
)

var categories = []string{catReadCopy, catRead, catWriteCopy, catWrite, catSleep, catFault, catKernel, catEntry, catCopy, catICRC, catProtocol,
	catRings, catPages, catTAP, catEngine, catClock, catRuntime, catProgram, catOther}

var (
	kernelCopy = regexp.MustCompile(`copy_(page_)?(to|from)_(iter|user)|^rep_movs|^memcpy|^copy(in|out)$|^csum_partial_copy`)
	tapRead    = regexp.MustCompile(`^(tun_chr_read_iter|tun_do_read|ksys_read|do_readv|vfs_readv?|__x64_sys_readv?)$`)
	tapWrite   = regexp.MustCompile(`^(tun_chr_write_iter|tun_get_user|ksys_write|do_writev|vfs_writev?|__x64_sys_writev?)$`)
	sleeping   = regexp.MustCompile(`^(__schedule|schedule.*|.*futex.*|.*epoll.*|.*nanosleep.*|__x64_sys_ppoll|__x64_sys_poll|do_sys_poll|__x64_sys_sched_yield|.*eventfd.*)$`)
	faulting   = regexp.MustCompile(`^(asm_)?exc_page_fault$|^handle_mm_fault$|userfaultfd|^__x64_sys_(madvise|mmap|munmap|mprotect|mlock)`)
	entering   = regexp.MustCompile(`^(entry_SYSCALL.*|do_syscall_64|syscall_(enter|exit)_.*|syscall_return.*|x64_sys_call|__x64_sys_\w+)$`)
	clock      = regexp.MustCompile(`^(__vdso_\w+|clock_gettime.*|gettimeofday|runtime\.(nanotime|walltime)\w*|time\.(now|Now|Since|runtimeNow))(\.abi0)?$`)
	icrc       = regexp.MustCompile(`(?i)crc`)
	copying    = regexp.MustCompile(`^(runtime\.memmove|__?mem(cpy|move)\w*)|/mr\.(caughtCopy|guardedCopy)`)
	rings      = regexp.MustCompile(`/qp\.\(\*(CQ|Ring|SendQueue|RecvQueue)\)|/provider\.\(\*(CQ|QP)\)\.(Poll|Post|ReqNotify)|^ibv_|^tv_(poll|post)`)
	entryGo    = regexp.MustCompile(`^(internal/runtime/syscall|syscall\.|golang\.org/x/sys/unix\.|runtime\.(entersyscall|exitsyscall|reentersyscall|cgocall))`)
	ourPackage = regexp.MustCompile(`tapverbs/tapverbs/([a-z/]+)\.`)
)

// byPackage are the packages of this project whose functions are of one category.
var byPackage = map[string]string{
	"mr": catPages, "tap": catTAP, "wire": catProtocol, "qp": catProtocol, "cm": catProtocol, "provider": catEngine,
	"shim/engine": catRuntime, "internal/stats": catProgram,
}

func isKernel(dso string) bool {
	return strings.HasPrefix(dso, "[") && dso != "[vdso]" && dso != "[unknown]" && dso != "[stack]" && dso != "[heap]" || strings.HasSuffix(dso, ".ko")
}

// category says what a sample is about.
func (h *hit) category() string {
	if len(h.chain) == 0 {
		return catOther
	}
	leaf := h.chain[0]
	if isKernel(leaf.dso) {
		return h.inKernel()
	}
	switch {
	case leaf.dso == "[vdso]" || clock.MatchString(leaf.sym):
		return catClock
	case copying.MatchString(leaf.sym):
		return catCopy
	case icrc.MatchString(leaf.sym):
		return catICRC
	case rings.MatchString(leaf.sym) || strings.Contains(leaf.dso, "/libibverbs.so"):
		return catRings
	case entryGo.MatchString(leaf.sym):
		return catEntry
	}
	if m := ourPackage.FindStringSubmatch(leaf.sym); m != nil {
		if c, known := byPackage[m[1]]; known {
			return c
		}
		return catProgram
	}
	switch {
	case strings.HasPrefix(leaf.sym, "runtime.") || strings.HasPrefix(leaf.sym, "runtime/") || strings.HasPrefix(leaf.sym, "internal/") || strings.HasPrefix(leaf.sym, "sync") ||
		strings.Contains(leaf.sym, "cgo") || strings.Contains(leaf.dso, "/libtapverbs-engine.so"):
		return catRuntime
	case leaf.dso == "[unknown]" || leaf.sym == "[unknown]" && !strings.Contains(leaf.dso, "/"):
		return catOther
	}
	return catProgram
}

// inKernel is category where the kernel was at work: what counts is what it was asked for. A
// sample in the scheduler is that also when a read or a write sleeps.
func (h *hit) inKernel() string {
	copies := kernelCopy.MatchString(h.chain[0].sym)
	for i, c := range h.chain {
		if !isKernel(c.dso) {
			break
		}
		switch {
		case sleeping.MatchString(c.sym):
			return catSleep
		case faulting.MatchString(c.sym):
			return catFault
		case tapRead.MatchString(c.sym) && copies:
			return catReadCopy
		case tapRead.MatchString(c.sym):
			return catRead
		case tapWrite.MatchString(c.sym) && copies:
			return catWriteCopy
		case tapWrite.MatchString(c.sym):
			return catWrite
		case i == 0 && entering.MatchString(c.sym):
			return catEntry
		}
	}
	return catKernel
}

// within says whether a function is among a sample's callers.
func (h *hit) within(sym string) bool {
	for _, c := range h.chain {
		if c.sym == sym {
			return true
		}
	}
	return false
}

var hitLine = regexp.MustCompile(`^\s*(?:\d+/)?\d+ +([0-9.]+): +([0-9]+)`)

// callLine reads "ADDRESS FUNCTION (FILE)" behind white space, of which there are millions.
func callLine(line string) (c call, ok bool) {
	if line == "" || line[0] != '\t' && line[0] != ' ' || line[len(line)-1] != ')' {
		return c, false
	}
	_, rest, _ := strings.Cut(strings.TrimLeft(line, "\t "), " ")
	i := strings.LastIndex(rest, " (")
	if i < 0 {
		return c, false
	}
	return call{rest[:i], rest[i+2 : len(rest)-1]}, true
}

// perfScript reads what perf script -F pid,tid,time,period,ip,sym,dso prints: a line with a time
// and a period for each sample, one for each call below it, and an empty one.
func perfScript(text string) (hits []hit, err error) {
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if c, ok := callLine(line); ok && len(hits) > 0 {
			h := &hits[len(hits)-1]
			h.chain = append(h.chain, c)
			continue
		}
		m := hitLine.FindStringSubmatch(line)
		switch {
		case m != nil:
			at, err1 := strconv.ParseFloat(m[1], 64)
			ns, err2 := strconv.ParseFloat(m[2], 64)
			if err1 != nil || err2 != nil {
				return nil, fmt.Errorf("perf script printed %q", line)
			}
			hits = append(hits, hit{at: at, ns: ns})
		case strings.TrimSpace(line) != "":
			return nil, fmt.Errorf("perf script printed %q", line)
		}
	}
	return hits, nil
}

// span is a time, in seconds.
type span struct{ from, to float64 }

// spans gives when a process was at something: while its samples within a function, inner, are not
// interrupted by others that are within the function that it belongs to, outer.
func spans(hits []hit, outer, inner string) (ss []span) {
	open := false
	for i := range hits {
		h := &hits[i]
		switch in := h.within(inner); {
		case in && !open:
			ss, open = append(ss, span{h.at, h.at}), true
		case in:
			ss[len(ss)-1].to = h.at
		case h.within(outer):
			open = false
		}
	}
	return ss
}

// costs gives the ns of each category, of the samples within some spans.
func costs(hits []hit, ss []span) map[string]float64 {
	out := make(map[string]float64)
	for i := range hits {
		h := &hits[i]
		if slices.ContainsFunc(ss, func(s span) bool { return s.from <= h.at && h.at <= s.to }) {
			out[h.category()] += h.ns
		}
	}
	return out
}
