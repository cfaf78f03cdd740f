// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/qp"
)

// maxPersists is how many FLUSHes are written to disks at a time. Each has a thread
// meanwhile, and how many QPs ask for one is the peers' affair.
const maxPersists = 32

// persist is what a QP calls for a FLUSH to persistence. Disks are slow, and the
// baton is everybody's: a goroutine waits for the disk, and then takes the baton to
// let the answer go. There is one at a time for a QP.
func (s *shard) persist(q *qp.QP, r *mr.Region, iova, n uint64, ticket uint32) {
	p, ok := q.User().(*QP)
	if !ok {
		return
	}
	s.beside.Add(1)
	go func() {
		defer s.beside.Done()
		s.persisting <- struct{}{}
		err := r.Persist(iova, n)
		<-s.persisting
		s.lock()
		if !p.gone && !s.closing {
			q.Persisted(ticket, err)
			s.activate(p)
			s.progress(false, postRounds)
		}
		s.release()
	}()
}
