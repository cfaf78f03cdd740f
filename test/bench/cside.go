// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// The cost of the C side: the check "bench" of test/conformance/testdata/verbs.c, a
// program that is built with the system's verbs.h and runs on libibverbs.so.1 here.

// cSources are its files, from the root of the module.
const cSources = "test/conformance/testdata/verbs.c test/conformance/testdata/stress.c test/conformance/testdata/later.c test/conformance/testdata/attrs.c test/conformance/testdata/signals.c"

// cCalls names what is measured, in the order in which the program prints it.
var cCalls = []string{"`ibv_post_recv`", "`ibv_post_send`, with what the engine does at once", "`ibv_poll_cq` with a completion", "`ibv_poll_cq` without"}

var cNumber = regexp.MustCompile(`\b[0-9]+\b`)

// compile has a C program compiled once, and gives its path. The sources are named from the
// root of the module, the package by pkg-config's name.
func (r *room) compile(name, sources, pkg string) (string, error) {
	program := filepath.Join(r.dir, name)
	if _, err := os.Stat(program); err == nil {
		return program, nil
	}
	line := "cc -O2 -o " + program + " " + sources
	if pkg != "" {
		line += " $(pkg-config --cflags --libs " + pkg + ") -lpthread"
	}
	if out, err := exec.Command("sh", "-c", line).CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s (in the root of the module): %w: %s", line, err, lastLines(string(out)))
	}
	return program, nil
}

// cPart measures the ns of each call.
func cPart(r *room, b *book) error {
	program, err := r.compile("verbs", cSources, "libibverbs")
	if err != nil {
		return err
	}
	c, err := command{at: r.here, args: []string{filepath.Join(r.bin, "tapverbs"), "run", "-port", r.ports[0].Name, "--", program, "bench"}}.start()
	if err != nil {
		return err
	}
	if err := c.wait(longest); err != nil {
		return err
	}
	_, text, _ := strings.Cut(c.out.String(), "ns per call:")
	found := cNumber.FindAllString(text, -1)
	if len(found) != len(cCalls) {
		return fmt.Errorf("verbs bench printed %q", c.out.String())
	}
	for i, s := range found {
		n, err := strconv.Atoi(s)
		if err != nil {
			return err
		}
		b.add("c", cCalls[i], 0, callNs, float64(n))
	}
	return nil
}
