// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
)

// What of the bandwidth is left when frames are lost: messages of 1 MiB, in frames of one
// packet and in super-frames, of which each is lost whole.

const (
	recoverySize   = 1 << 20
	recoveryDepth  = 8
	recoveryRegion = recoveryDepth * recoverySize
	recoveryTime   = 600 * time.Millisecond
)

var (
	recoveryLoss   = [...]float64{0, 0.001, 0.01, 0.05}
	recoveryFrames = [...]string{"single", "super"}
	recoveryOps    = [...]qp.WROpcode{qp.WRWrite, qp.WRSend, qp.WRRead}
)

// recoveryRow is what one operation reached, of which the medians count.
type recoveryRow struct {
	Frames string
	Op     qp.WROpcode
	Gbps   [len(recoveryLoss)][]float64
}

// recoveries has both kinds of frames measured, each by two processes of its own.
func recoveries(runs int) (rows []recoveryRow, err error) {
	for _, f := range recoveryFrames {
		if err := os.Setenv(provider.EnvFrames, f); err != nil {
			return nil, err
		}
		r, err := pairResults("recovery", runs)
		if err != nil {
			return nil, err
		}
		for i := range r.Recovery {
			r.Recovery[i].Frames = f
		}
		rows = append(rows, r.Recovery...)
	}
	return rows, nil
}

// recovers measures each operation with each loss in turn, runs times.
func (p *peer) recovers(runs int) ([]recoveryRow, error) {
	rows := make([]recoveryRow, len(recoveryOps))
	if err := p.region(order{Bytes: recoveryRegion}); err != nil {
		return nil, err
	}
	if _, err := p.tell(order{Do: "state", State: stateResident, N: recoveryRegion}); err != nil {
		return nil, err
	}
	for range runs {
		for i, op := range recoveryOps {
			rows[i].Op = op
			for k, loss := range recoveryLoss {
				g, err := p.recovery(op, loss, 0)
				if err != nil {
					return nil, fmt.Errorf("%s, %g %% lost: %w", recoveryName(op), 100*loss, err)
				}
				rows[i].Gbps[k] = append(rows[i].Gbps[k], g)
			}
		}
	}
	return rows, nil
}

// recovery gives the bandwidth of one operation with a loss of frames, or of the packets in
// them, in Gbit/s.
func (p *peer) recovery(op qp.WROpcode, frames, packets float64) (float64, error) {
	err := p.faults(0)
	if err == nil {
		err = p.join(ackTimeout)
	}
	if err == nil && op == qp.WRSend {
		_, err = p.tell(order{Do: "receive", N: recoverySize})
	}
	if err == nil {
		err = p.lose(frames, packets)
	}
	if err != nil {
		return 0, err
	}
	i, end := -1, time.Now().Add(recoveryTime)
	bytes, took, err := p.streamOf(recoveryDepth, op, recoverySize, func() (uint64, bool) {
		i++
		return uint64(i%recoveryDepth) * recoverySize, time.Now().Before(end)
	})
	return float64(bytes) * 8 / float64(took), errors.Join(err, p.faults(0))
}

// receive posts receives of n bytes to the owner's region, and has those that complete
// posted again.
func (o *owner) receive(n uint64) error {
	if n == 0 || o.reg == nil || n > uint64(len(o.mem.Bytes())) {
		return fmt.Errorf("no room for receives of %d bytes", n)
	}
	o.again = qp.RecvWR{SGL: []qp.SGE{{Addr: uint64(o.mem.Addr()), Length: uint32(n), LKey: o.reg.LKey()}}}
	for range sendDepth {
		if err := o.repost(); err != nil {
			return err
		}
	}
	return nil
}

func (o *owner) repost() error {
	wr := [1]qp.RecvWR{o.again}
	_, err := o.qp.PostRecv(wr[:])
	return err
}

// taken posts anew what has completed.
func (o *owner) taken(wcs []qp.WC) error {
	for _, wc := range wcs {
		if wc.Opcode == qp.WCRecv && wc.Status == qp.WCSuccess {
			if err := o.repost(); err != nil {
				return err
			}
		}
	}
	return nil
}

func recoveryName(op qp.WROpcode) string {
	if op == qp.WRSend {
		return "SEND"
	}
	return opName(op)
}

func printRecovery(w io.Writer, rows []recoveryRow) {
	fmt.Fprintf(w, "\n| %s, Gbit/s | no loss |", sizeString(recoverySize))
	for _, l := range recoveryLoss[1:] {
		fmt.Fprintf(w, " %g %% of the frames lost | of no loss |", 100*l)
	}
	fmt.Fprintf(w, "\n|---|---:|")
	for range recoveryLoss[1:] {
		fmt.Fprint(w, "---:|---:|")
	}
	fmt.Fprintln(w)
	for _, r := range rows {
		clean := median(r.Gbps[0])
		fmt.Fprintf(w, "| %s, %s frames | %.2f |", recoveryName(r.Op), r.Frames, clean)
		for _, g := range r.Gbps[1:] {
			fmt.Fprintf(w, " %.2f | %.2f |", median(g), median(g)/clean)
		}
		fmt.Fprintln(w)
	}
}
