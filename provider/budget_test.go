// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"errors"
	"testing"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/test/harness"
)

// TestDomainBudget: a protection domain's budget and use can be read, parent domains share
// them, and a domain that is given back leaves no budget behind.
func TestDomainBudget(t *testing.T) {
	d := harness.NewPair(t, link).Dev[0]
	pd, err := d.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	parent, err := pd.AllocParent()
	if err != nil {
		t.Fatal(err)
	}
	const budget = 1 << 20
	if err := parent.SetBudget(budget); errors.Is(err, mr.ErrNotSupported) {
		t.Skip(err)
	} else if err != nil {
		t.Fatal(err)
	}
	for _, p := range []*provider.PD{pd, parent} {
		if u, err := p.Usage(); err != nil || u.Budget != budget || u.Size != 0 {
			t.Errorf("%+v, %v", u, err)
		}
	}
	if err := parent.Dealloc(); err != nil {
		t.Fatal(err)
	}
	if u, err := pd.Usage(); err != nil || u.Budget != budget {
		t.Errorf("without its parent domain: %+v, %v", u, err)
	}
	if _, err := parent.Usage(); err != provider.ErrClosed {
		t.Errorf("of one that is gone: %v", err)
	}
	if err := pd.Dealloc(); err != nil {
		t.Fatal(err)
	}
	if n := pd.BudgetLeft(); n != 0 {
		t.Errorf("a budget of %d bytes is left", n)
	}
}
