// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/tapverbs/tapverbs/provider"
)

// suspender suspends and resumes a region in a rhythm until end is called. Requests
// that meet a suspended region wait, as package mr says; none fails.
type suspender struct {
	stop, done chan struct{}
	times      uint64
	err        error
}

// suspend begins with a suspension, so that the shortest measurement meets one.
func suspend(reg *provider.MR, r rhythm) (*suspender, error) {
	s := &suspender{stop: make(chan struct{}), done: make(chan struct{}), times: 1}
	if err := reg.Suspend(); err != nil {
		return nil, err
	}
	go func() {
		defer close(s.done)
		for {
			time.Sleep(r.For)
			if s.err = reg.Resume(); s.err != nil {
				return
			}
			select {
			case <-s.stop:
				return
			case <-time.After(r.Every - r.For):
			}
			if s.err = reg.Suspend(); s.err != nil {
				return
			}
			s.times++
		}
	}()
	return s, nil
}

// end leaves the region resumed and tells how often it was suspended.
func (s *suspender) end() (times uint64, err error) {
	if s == nil {
		return 0, nil
	}
	close(s.stop)
	<-s.done
	return s.times, s.err
}
