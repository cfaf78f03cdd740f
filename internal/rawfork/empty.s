// SPDX-License-Identifier: Apache-2.0
//
// Functions without a body, which rawfork.go takes from the runtime, need a file like this.
