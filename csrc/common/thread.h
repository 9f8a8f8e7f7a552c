// Threads with names, and an error that says what to do where the process can have no more.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace bagua {

// Starts a thread of that name. Throws TransportError where the kernel refuses one: it does not say whether threads
// have ended or the memory for a stack. The rank is not known here: the caller names it (of_rank).
std::thread start_thread(const std::string& name, std::function<void()> body);

}  // namespace bagua
