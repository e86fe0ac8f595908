#include "frame/scratch.hpp"

#include <memory>

namespace fsl {

Scratch& scratch_of_this_thread() {
  thread_local std::unique_ptr<Scratch> scratch;
  if (scratch == nullptr) scratch = std::make_unique<Scratch>();
  return *scratch;
}

}  // namespace fsl
