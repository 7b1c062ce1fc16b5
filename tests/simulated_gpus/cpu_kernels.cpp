// The kernels of simulated GPUs: each of torch's operators for CUDA runs the CPU's kernel on the same memory.
//
// Tensors stay CUDA tensors for torch: devices, streams, autocast, autograd and the caching allocator are torch's own.
// As on a GPU, tensors of different devices in one operation are an error.  `install` is called once torch is imported.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <unordered_map>

namespace {

// Operators that torch's CUDA backend does itself, because they compute nothing: it makes tensors, or looks at them.
const std::set<std::string> TORCHS_OWN = {
    "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::record_stream", "aten::is_pinned",
    "aten::_pin_memory", "aten::_local_scalar_dense", "aten::is_set_to", "aten::_efficientzerotensor",
    "aten::_cudnn_init_dropout_state", "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold",
    "aten::alias", "aten::view_as_real", "aten::view_as_complex", "aten::_to_copy"};

// Operators without a CUDA kernel of their own that must be computed here all the same.
const std::set<std::string> ALSO = {"aten::copy_", "aten::convolution", "aten::convolution_backward"};

// Operators that take tensors of several devices.
const std::set<std::string> TAKES_SEVERAL_DEVICES = {
    "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::index_put_", "aten::index.Tensor",
    "aten::_index_put_impl_", "aten::set_data"};

at::Tensor on_the_cpu(const at::Tensor& tensor) {  // the same memory
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

// The tensors of one call: each CUDA tensor, and the CPU tensor that stands for it.
struct Call {
  std::string name;
  std::unordered_map<c10::TensorImpl*, at::Tensor> on_cpu;   // by the CUDA tensor
  std::unordered_map<c10::TensorImpl*, at::Tensor> on_gpu;   // by the CPU tensor
  std::set<c10::TensorImpl*> outputs;                        // CPU tensors that the kernel may resize
  c10::optional<c10::Device> device;
  bool several_devices = false, with_a_cpu_tensor = false;

  at::Tensor to_cpu(const at::Tensor& tensor, bool is_output) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      with_a_cpu_tensor |= tensor.is_cpu() && tensor.dim() > 0;
      return tensor;
    }
    if (!device) device = tensor.device();
    several_devices |= *device != tensor.device() && tensor.dim() > 0;
    auto known = on_cpu.find(tensor.unsafeGetTensorImpl());
    if (known != on_cpu.end()) return known->second;
    at::Tensor cpu = on_the_cpu(tensor);
    if (is_output) {  // memory of its own, that can be resized
      cpu = at::empty_strided(tensor.sizes(), tensor.strides(), cpu.options());
      outputs.insert(cpu.unsafeGetTensorImpl());
    }
    on_cpu[tensor.unsafeGetTensorImpl()] = cpu;
    on_gpu[cpu.unsafeGetTensorImpl()] = tensor;
    return cpu;
  }

  at::Tensor to_gpu(const at::Tensor& cpu) {
    if (!cpu.defined()) return cpu;
    auto known = on_gpu.find(cpu.unsafeGetTensorImpl());
    if (known != on_gpu.end()) {
      if (outputs.count(cpu.unsafeGetTensorImpl())) fill(known->second, cpu);
      return known->second;
    }
    if (!device || !cpu.device().is_cpu()) return cpu;
    at::Tensor gpu = at::empty_strided(cpu.sizes(), cpu.strides(), cpu.options().device(*device));
    if (cpu.numel()) on_the_cpu(gpu).copy_(cpu);
    return gpu;
  }

  void fill(at::Tensor gpu, const at::Tensor& cpu) {
    if (gpu.sizes() != cpu.sizes()) gpu.resize_(cpu.sizes());
    if (cpu.numel()) on_the_cpu(gpu).copy_(cpu);
  }

  void check() const {  // what a GPU's kernel refuses
    if (TAKES_SEVERAL_DEVICES.count(name)) return;
    TORCH_CHECK(!several_devices, "simulated GPU: tensors on different GPUs in ", name);
    TORCH_CHECK(!with_a_cpu_tensor || !device,
                "Expected all tensors to be on the same device, but found a CPU tensor in ", name);
  }
};

c10::IValue to_cpu(Call& call, const c10::IValue& value, bool is_output) {
  if (value.isTensor()) return call.to_cpu(value.toTensor(), is_output);
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(call.to_cpu(tensor, is_output));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<c10::optional<at::Tensor>> tensors;
    for (c10::optional<at::Tensor> tensor : value.toOptionalTensorVector())
      tensors.push_back(tensor ? c10::optional<at::Tensor>(call.to_cpu(*tensor, is_output)) : tensor);
    return tensors;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) {
    if (!call.device) call.device = value.toDevice();
    return c10::Device(at::kCPU);
  }
  if (value.isGenerator()) return c10::IValue();  // the CPU's own
  return value;
}

c10::IValue to_gpu(Call& call, const c10::IValue& value) {
  if (value.isTensor()) return call.to_gpu(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(call.to_gpu(tensor));
    return tensors;
  }
  return value;
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const std::string& overload = schema.overload_name();
  Call call{overload.empty() ? schema.name() : schema.name() + "." + overload};
  size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto* alias = arguments[i].alias_info();
    bool is_output = alias && alias->isWrite() && arguments[i].kwarg_only();
    c10::IValue& value = (*stack)[first + i];
    value = to_cpu(call, value, is_output);
  }
  call.check();
  if (call.device && !call.device->has_index())
    call.device = c10::impl::getDeviceGuardImpl(at::kCUDA)->getDevice();  // "cuda" means the current one
  c10::OptionalDeviceGuard guard(call.device);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  size_t results = schema.returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    value = to_gpu(call, value);
  }
  if (results == 0)
    for (auto& pair : call.on_gpu)
      if (call.outputs.count(pair.first)) call.fill(pair.second, call.on_cpu[pair.second.unsafeGetTensorImpl()]);
}

bool returns_a_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

}  // namespace

extern "C" int install() {  // the number of operators
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  int count = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || TORCHS_OWN.count(name.name)) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || returns_a_view(op->schema())) continue;
    if (!ALSO.count(name.name) && !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    if (!op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
    count++;
  }
  return count;
}

TORCH_LIBRARY(simulated, library) { library.def("on_the_cpu(Tensor(a) tensor) -> Tensor(a)", &on_the_cpu); }
