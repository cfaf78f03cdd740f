// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"errors"
	"testing"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/tap"
)

func TestFramesAndECNFromEnv(t *testing.T) {
	const single = tap.USO4 | tap.USO6
	for _, c := range []struct {
		name, value string
		want        provider.Config
		bad         bool
	}{
		{"", "", provider.Config{}, false},
		{provider.EnvECN, "on", provider.Config{}, false},
		{provider.EnvECN, "off", provider.Config{NoECN: true}, false},
		{provider.EnvECN, "no", provider.Config{}, true},
		{provider.EnvFrames, "single", provider.Config{Without: single}, false},
		{provider.EnvFrames, "plain", provider.Config{Plain: true}, false},
		{provider.EnvFrames, "jumbo", provider.Config{}, true},
	} {
		got, err := provider.ConfigFromEnv(func(name string) string {
			if name == c.name {
				return c.value
			}
			return ""
		})
		switch {
		case c.bad:
			if !errors.Is(err, provider.ErrInvalid) {
				t.Errorf("%s=%s: %v", c.name, c.value, err)
			}
		case err != nil || got.NoECN != c.want.NoECN || got.Without != c.want.Without || got.Plain != c.want.Plain:
			t.Errorf("%s=%s: %+v, %v", c.name, c.value, got, err)
		}
	}
}
