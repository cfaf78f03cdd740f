// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"testing"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/test/harness"
)

// Of what happens in one iteration to several CQs of a channel it is told once.
func TestEventsToldTogether(t *testing.T) {
	p := harness.NewPair(t, link)
	d := p.Dev[0]
	var events, told int
	ch, err := d.CreateCompChannelFunc(func(*provider.CQ) { events++ }, func() { told++ })
	if err != nil {
		t.Fatal(err)
	}
	pd, err := d.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	var qps [20]*provider.QP
	for i := range qps {
		cq, err := d.CreateCQ(4, ch)
		if err != nil {
			t.Fatal(err)
		}
		if qps[i], err = pd.CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: cq, RecvCQ: cq, Caps: qp.Caps{SendWR: 1, RecvWR: 1, SendSGE: 1, RecvSGE: 1}}); err != nil {
			t.Fatal(err)
		}
		if err := harness.Up(qps[i], provider.QPAttr{Attr: qp.Attr{Port: 1}}, qp.StateInit); err != nil {
			t.Fatal(err)
		}
		if err := qps[i].Modify(provider.QPAttr{Attr: qp.Attr{State: qp.StateErr}}, qp.AttrState); err != nil {
			t.Fatal(err)
		}
		cq.ReqNotify(false)
	}
	d.Hold(func() {
		for _, q := range qps {
			if _, err := q.PostSend([]qp.SendWR{{Opcode: qp.WRSend}}); err != nil { // which is flushed
				t.Error(err)
			}
		}
	})
	for d.Progress() {
	}
	if events != len(qps) || told != 1 {
		t.Errorf("%d events of %d, told %d times", events, len(qps), told)
	}
}
