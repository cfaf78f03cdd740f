// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strconv"
)

// TCP, and what libfabric and UCX make of it, between the two hosts on the bridge.

// tripSizes are the messages whose round trips are measured with all of them, in bytes.
var tripSizes = []int{8, 64, 512, 4 << 10, 32 << 10}

// tcpPart is iperf3, with its defaults but for how much it sends, then with each size for
// what it writes at once, and a ping-pong.
func tcpPart(r *room, b *book) error {
	b.try("tcp", key{Who: "tcp", What: "iperf3"}, r.iperf(b, 0, "-n", "1G"))
	for _, n := range sizes {
		b.try("tcp", key{Who: "tcp", What: "iperf3 -l", X: n}, r.iperf(b, n, "-l", strconv.Itoa(n), "-t", "1"))
	}
	program, err := r.compile("tcpping", "test/bench/testdata/tcpping.c", "")
	for _, how := range []string{"poll", "sleep"} {
		if err != nil {
			b.try("tcp", key{Who: "tcp", What: how}, err)
			continue
		}
		for _, n := range tripSizes {
			b.try("tcp", key{Who: "tcp", What: how, X: n}, r.tcpPing(b, program, how, n))
		}
	}
	return nil
}

// iperf runs iperf3; size is what it writes at once, 0 for its default (128 KiB), with which
// its processor time counts, too.
func (r *room) iperf(b *book, size int, flags ...string) error {
	if err := there("iperf3"); err != nil {
		return err
	}
	const port = 5201
	server := command{at: r.hosts[0].thread, args: []string{"iperf3", "-s", "-1"}}
	o, err := pair(server, command{at: r.hosts[1].thread, args: append([]string{"iperf3", "-c", r.hosts[0].addr, "-J"}, flags...)}, port)
	if err != nil {
		return err
	}
	g, bytes, err := iperf3Result(o.client)
	if err != nil {
		return err
	}
	if size > 0 {
		b.add("tcp", "iperf3 -l", size, gbps, g)
		return nil
	}
	b.add("tcp", "iperf3", 0, gbps, g)
	b.add("tcp", "iperf3", 0, cpuGiB, o.cpu/bytes*(1<<30))
	b.add("tcp", "iperf3", 0, allGiB, o.busy/bytes*(1<<30))
	return nil
}

func (r *room) tcpPing(b *book, program, how string, n int) error {
	const port = 18602
	args := []string{program, how, strconv.Itoa(n), "10000", strconv.Itoa(port)}
	o, err := pair(command{at: r.hosts[0].thread, args: args}, command{at: r.hosts[1].thread, args: append(args, r.hosts[0].addr)}, port)
	if err != nil {
		return err
	}
	v, err := tcpPing(o.client)
	if err != nil {
		return err
	}
	for i, metric := range []string{p50, p99, p999, mean} {
		b.add("tcp", how, n, metric, v[i])
	}
	return nil
}

// libfabricPart is fi_pingpong on the provider tcp, which polls its completion queue and says
// means only. Its bandwidth is that of a ping-pong: one message at a time.
func libfabricPart(r *room, b *book) error {
	for _, n := range sizes {
		b.try("libfabric", key{Who: "libfabric tcp", What: "send", X: n}, r.fi(b, n))
	}
	return nil
}

// fiLine is fi_pingpong with n round trips of messages of a size.
func fiLine(size, n int) []string {
	return []string{"fi_pingpong", "-p", "tcp", "-e", "msg", "-I", strconv.Itoa(n), "-S", strconv.Itoa(size)}
}

// both runs a program in both hosts, the client with the server's address behind its arguments.
func (r *room) both(args []string, port int) (outcome, error) {
	if err := there(args[0]); err != nil {
		return outcome{}, err
	}
	return pair(command{at: r.hosts[0].thread, args: args}, command{at: r.hosts[1].thread, args: append(args, r.hosts[0].addr)}, port)
}

const fiPort = 47592

func (r *room) fi(b *book, n int) error {
	o, err := r.both(fiLine(n, max(300, 3000*1024/max(n, 1024))), fiPort)
	if err != nil {
		return err
	}
	us, mb, err := fiPingpong(o.client, n)
	if err != nil {
		return err
	}
	b.add("libfabric tcp", "send", n, mean, us)
	b.add("libfabric tcp", "send", n, gbps, mb*8/1000)
	return nil
}

// ucxTest is a run of ucx_perftest, which polls; what it has of a run's times is their median.
type ucxTest struct {
	test, what string
	size, n    int
}

// ucxTests are the runs of a round.
func ucxTests() (ts []ucxTest) {
	for _, n := range sizes {
		ts = append(ts, ucxTest{"ucp_put_bw", "write", n, min(100000, 500<<20/n)})
	}
	for _, n := range tripSizes {
		ts = append(ts, ucxTest{"tag_lat", "send", n, 5000}, ucxTest{"ucp_put_lat", "write", n, 5000})
	}
	return ts
}

func ucxPart(r *room, b *book) error {
	for _, t := range ucxTests() {
		o, err := r.ucx(t)
		var u ucxResult
		if err == nil {
			u, err = ucxPerftest(o.client)
		}
		switch {
		case err != nil:
			b.try("ucx", key{Who: "ucx tcp", What: t.what, X: t.size}, fmt.Errorf("%s: %w", t.test, err))
		case t.test == "ucp_put_bw":
			b.add("ucx tcp", t.what, t.size, gbps, u.Gbps)
			b.add("ucx tcp", t.what, t.size, rate, u.Rate)
		default:
			b.add("ucx tcp", t.what, t.size, p50, u.Percentile)
			b.add("ucx tcp", t.what, t.size, mean, u.Mean)
		}
	}
	return nil
}

func (r *room) ucx(t ucxTest) (outcome, error) {
	if err := there("ucx_perftest"); err != nil {
		return outcome{}, err
	}
	const port = 13337
	env := []string{"UCX_TLS=tcp", "UCX_NET_DEVICES=eth0", "UCX_WARN_UNUSED_ENV_VARS=n"}
	server := command{at: r.hosts[0].thread, args: []string{"ucx_perftest", "-f"}, env: env}
	args := []string{"ucx_perftest", r.hosts[0].addr, "-f", "-t", t.test, "-s", strconv.Itoa(t.size), "-n", strconv.Itoa(t.n), "-w", strconv.Itoa(min(t.n/10, 1000))}
	return pair(server, command{at: r.hosts[1].thread, args: args, env: env}, port)
}
