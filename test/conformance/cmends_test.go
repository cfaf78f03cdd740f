// SPDX-License-Identifier: Apache-2.0

package conformance

import "testing"

// TestCMEnds runs the checks of testdata/cmends.c.
func TestCMEnds(t *testing.T) { inFabric(t, nil, 0, 1, bin("cmends")) }
